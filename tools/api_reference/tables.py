"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def test_name(node: str) -> str:
    """A test's id, without the folder that all tests share."""
    return code(node.removeprefix("tests/"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
