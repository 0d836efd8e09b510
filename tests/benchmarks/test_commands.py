"""Benchmarks call themselves what they are called by."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROG = re.compile(r'^    prog: ClassVar\[str\] = "(.*)"$', re.MULTILINE)
NAMED = re.compile(r"\bbenchmarks(?:\.[a-z_]+)+")


def test_a_command_has_the_name_of_its_module() -> None:
    """Or that of its folder, where this is the command."""
    wrong, found = [], 0
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for prog in PROG.findall(path.read_text()):
            found += 1
            module = path.parent if (path.parent / "__main__.py").exists() else path.with_suffix("")
            if prog != ".".join(module.relative_to(ROOT).parts):
                wrong.append(f"{path.relative_to(ROOT)}: {prog}")
    assert (wrong, found > 20) == ([], True)


def test_texts_name_modules_that_exist() -> None:
    wrong = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for name in NAMED.findall(path.read_text()):
            place = ROOT.joinpath(*name.split("."))
            if not place.is_dir() and not place.with_suffix(".py").exists():
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []
