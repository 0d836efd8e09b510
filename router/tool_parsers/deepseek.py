"""Calls as DeepSeek's models write them: V3 and R1, V3.1. V3.2 writes markup (`invoke`)."""

from __future__ import annotations

from router.tool_parsers.sections import SectionParser
from router.tool_parsers.source import Reading

_SEPARATOR = "<｜tool▁sep｜>"


class _DeepSeekParser(SectionParser):
    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    ends = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def read_known_name(self) -> Reading[str | None]:
        name = yield from self.read_name()
        return name if name in self.tools else None


class DeepSeekV3Parser(_DeepSeekParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, and the arguments on the next lines, in a fence."""

    def read_name_and_arguments(self) -> Reading[bool]:
        source = self.source
        if not (yield from source.literal("function")) or not (yield from source.literal(_SEPARATOR)):
            return False
        name = yield from self.read_known_name()
        yield from source.blanks()
        if name is None or not (yield from source.literal("```json")):
            return False
        yield from source.blanks()
        if not (yield from self.read_arguments(name)):
            return False
        yield from self.read_ends("```")
        return True


class DeepSeekV31Parser(_DeepSeekParser):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

    def read_name_and_arguments(self) -> Reading[bool]:
        name = yield from self.read_known_name()
        if name is None or not (yield from self.source.literal(_SEPARATOR)):
            return False
        yield from self.source.blanks()
        return (yield from self.read_arguments(name))
