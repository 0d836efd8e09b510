"""The checks of `make check`, run two at a time: prints a line per check, and the tool's output where one fails.

The layout rules cover what no tool checks: `proto/` and `kernels/` are folders on the path and never packages, since as
import names they would shadow proto-plus's `proto` and Hugging Face's `kernels`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("proto", "kernels")
TIMEOUT_S = 600
"""For one check; `make test` runs its tests at the same time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`report` is empty if the check passed."""

    name: str
    seconds: float
    report: str


def tool(*arguments: str) -> Callable[[], str]:
    """A check that runs this environment's Python; its report is empty on exit code 0."""

    def run() -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(str(ROOT / name) for name in SOURCE_ROOTS)])}
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done within {TIMEOUT_S} s"
        return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}".strip() or f"exit code {done.returncode}"

    return run


def layout() -> str:
    """The source roots are not packages, neither for Python nor for setuptools."""
    wrong = [f"{name}/__init__.py must not exist" for name in SOURCE_ROOTS if (ROOT / name / "__init__.py").exists()]
    for name in SOURCE_ROOTS:
        found = importlib.util.find_spec(name)
        if found and found.origin is not None and Path(found.origin).is_relative_to(ROOT):
            wrong.append(f"`import {name}` finds {found.origin}: it must be a folder on the path, not a package")
    return "\n".join(wrong)


CHECKS: dict[str, Callable[[], str]] = {
    "types": tool("-m", "mypy"),  # the slowest first
    "lint": tool("-m", "ruff", "check", "--output-format", "concise", "."),
    "format": tool("-m", "ruff", "format", "--check", "."),
    "imports": tool("-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-logo"),
    "stubs": tool("tools/generate_stubs.py", "--check"),
    "layout": layout,
}


def judge(name: str) -> Verdict:
    began = time.monotonic()
    report = CHECKS[name]()
    return Verdict(name, time.monotonic() - began, report)


def main() -> int:
    failed = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in as_completed([pool.submit(judge, name) for name in CHECKS]):
            verdict = done.result()
            failed += bool(verdict.report)
            print(f"{'FAILED' if verdict.report else 'ok':6} {verdict.name:8} {verdict.seconds:5.1f} s", flush=True)
            if verdict.report:
                print(verdict.report, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
