"""Several calls in one section, each with a mark of its own: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading


class SectionParser(ReadingParser):
    """`marks`: the beginning of a section and that of a call; `ends`: likewise. Only the first call of a section has
    its beginning before it, only the last its end behind."""

    marks: ClassVar[tuple[str, str]]
    ends: ClassVar[tuple[str, str]]
    keeps_special_tokens = True

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        section, call = self.marks
        if found == section:
            yield from source.blanks()
            if not (yield from source.literal(call)):
                return
        if (yield from self.read_name_and_arguments()):
            yield from self.read_ends(*self.ends)

    @abstractmethod
    def read_name_and_arguments(self) -> Reading[bool]:
        """What is behind a call's mark. As `read_arguments`."""
