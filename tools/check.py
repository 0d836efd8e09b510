"""The checks of `make check`, run two at a time: prints a line per check, and the tool's output where one fails.

Two checks are of our own, since no tool has them. The layout: `proto/` and `kernels/` are folders on the path and never
packages, since as import names they would shadow proto-plus's `proto` and Hugging Face's `kernels`. The length of
functions: what does not fit on a screen has parts with names. A kernel is the exception, because it cannot call parts
without cost.
"""

from __future__ import annotations

import ast
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
MAX_FUNCTION_LINES = 50
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


def lengths() -> str:
    """No function outside the kernels is longer than MAX_FUNCTION_LINES."""
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and entry.name[0] != "." and entry.name != "build"]
    wrong = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("kernels/", "proto/baton/v1/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno}: {node.name} has {num_lines} lines, over {MAX_FUNCTION_LINES}")
    return "\n".join(wrong)


CHECKS: dict[str, Callable[[], str]] = {
    "types": tool("-m", "mypy"),  # the slowest first
    "lint": tool("-m", "ruff", "check", "--output-format", "concise", "."),
    "format": tool("-m", "ruff", "format", "--check", "."),
    "imports": tool("-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-logo"),
    "stubs": tool("tools/generate_stubs.py", "--check"),
    "lengths": lengths,
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
