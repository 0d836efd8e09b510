"""What is said after all tests: the seconds of each folder beside its budget, and how many answers met a reference."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
BUDGET = re.compile(r"^\| `tests/(\w+)` \| (\d+) \|", re.MULTILINE)
COMPARED, NEAR_TIES, EXPERT_TIES = "compared with references", "near ties", "near ties of experts"
"""Properties of a test: answers, and those among them that leave the reference at a near tie of tokens, or after one of
a router's choice."""
_PARAMETER = "compared parameter"


def budgets() -> dict[str, int]:
    """Seconds by folder of `tests/`, from CONTRIBUTING.md's table."""
    return {folder: int(seconds) for folder, seconds in BUDGET.findall(CONTRIBUTING.read_text())}


def seconds_by_folder(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """A line for each folder; files beside the folders have no budget."""
    spent: dict[str, float] = defaultdict(float)
    for report in reports:
        spent[_folder(report.nodeid)] += report.duration
    known = budgets()
    for folder, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        budget = known.get(folder)
        over = " OVER ITS BUDGET" if budget is not None and seconds > budget else ""
        yield f"tests/{folder:12} {seconds:6.1f} s" + (f" of {budget} s{over}" if budget is not None else "")


def parity(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """One line, if answers were compared."""
    found = Counter[str]()
    for report in reports:
        if report.when == "teardown":  # whose report has all properties
            named = (COMPARED, NEAR_TIES, EXPERT_TIES)
            found.update({name: int(str(count)) for name, count in report.user_properties if name in named})
    if found[COMPARED]:
        ties = f"{found[NEAR_TIES]} near ties, {found[EXPERT_TIES]} of experts"
        yield f"parity: {found[COMPARED]} answers compared with references, {ties}"


def compared_parameter(name: str, way: str) -> tuple[str, str]:
    """The property of a test that one answer with this sampling parameter was as it should be on this way."""
    return _PARAMETER, f"{name}/{way}"


def parameters(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """A table of the answers that were compared, by parameter and way."""
    counts = Counter[tuple[str, str]]()
    for report in reports:
        if report.when == "teardown":
            counts.update(_pair(value) for name, value in report.user_properties if name == _PARAMETER)
    ways = sorted({way for _, way in counts})
    if ways:
        yield f"{'parameter':32}" + "".join(f"{way:>12}" for way in ways)
    for parameter in sorted({parameter for parameter, _ in counts}):
        yield f"{parameter:32}" + "".join(f"{counts[parameter, way]:12}" for way in ways)


def _pair(value: object) -> tuple[str, str]:
    name, _, way = str(value).partition("/")
    return name, way


def _folder(nodeid: str) -> str:
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else ""
