"""Tables of text, for a terminal or a page. Numbers are already formatted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table; each row has a text for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def plain(self) -> str:
        """As plain text, with right-aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines
        )

    def markdown(self) -> str:
        """As a GitHub Markdown table."""
        lines = [self.columns, ["---:"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
