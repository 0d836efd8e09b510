"""Calls as DeepSeek's models write them: V3 and R1, V3.1. V3.2 writes markup (`invoke`)."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS = 256
_SEPARATOR = "<｜tool▁sep｜>"
_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


class _DeepSeekParser(ReadingParser):
    """Several calls are in one section. Only the first has its beginning before it, only the last its end behind."""

    _SECTION: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    _CALL: ClassVar[str] = "<｜tool▁call▁begin｜>"
    marks = (_SECTION, _CALL)
    keeps_special_tokens = True

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        if found == self._SECTION:
            yield from source.blanks()
            if not (yield from source.literal(self._CALL)):
                return
        if not (yield from self.read_name_and_arguments()):
            return
        for end in _ENDS:
            yield from source.blanks()
            if (yield from source.literal(end)):
                source.begin()

    @abstractmethod
    def read_name_and_arguments(self) -> Reading[bool]: ...

    def read_known_name(self) -> Reading[str | None]:
        name = yield from self.source.text_of(_NAME, _MAX_NAME_CHARS)
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
        yield from source.blanks()
        if (yield from source.literal("```")):
            source.begin()
        return True


class DeepSeekV31Parser(_DeepSeekParser):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

    def read_name_and_arguments(self) -> Reading[bool]:
        name = yield from self.read_known_name()
        if name is None or not (yield from self.source.literal(_SEPARATOR)):
            return False
        yield from self.source.blanks()
        return (yield from self.read_arguments(name))
