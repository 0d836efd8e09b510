"""Calls written in Python, whose arguments are literals: Llama 3.2 and 4, ToolACE, Olmo 3."""

from __future__ import annotations

import re
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading
from router.tool_parsers.values import call_arguments

_MAX_DEPTH = 64
_PLAIN = re.compile(r"[^'\"()\[\]{}#\\]*")
_ESCAPED = "\n\\'\"abfnrtvxuUN"
"""Characters to which Python gives a meaning after a backslash. Before others it warns, and keeps the backslash."""
_RAW = re.compile(r"(?<!\w)[rR]$")
"""Before a string in which a backslash has no meaning."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "'\""}


class PythonicParser(ReadingParser):
    """`[f(a=1), g(b="x")]`, maybe between `<|python_start|>` and `<|python_end|>`. A call is emitted as a whole."""

    _START: ClassVar[str] = "<|python_start|>"
    marks: ClassVar[tuple[str, ...]] = (_START, "[")

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        if found == self._START:
            yield from source.literal(found)
            yield from source.blanks()
        if (yield from source.literal("[")) and (yield from self.read_list(self.read_one)):
            yield from self.read_ends("<|python_end|>")

    def read_one(self) -> Reading[bool]:
        yield from self.source.blanks()
        return (yield from self.read_named((yield from self.read_name())))

    def read_named(self, text: str) -> Reading[bool]:
        """A call whose name was read as `text`."""
        name = self.known_name(text)
        if name is None or not (yield from self.source.literal("(")):
            return False
        pieces: list[str] = []
        if not (yield from self._read_parentheses(pieces)):
            return False
        arguments = call_arguments("".join(pieces))
        if arguments is None:
            return False
        self.start_call(name)(arguments)
        self.source.begin()
        return True

    def known_name(self, name: str) -> str | None:
        return name if name in self.tools else None

    def _read_parentheses(self, pieces: list[str]) -> Reading[bool]:
        """What is between parentheses, of which the first was read. False: it is not Python."""
        source, open_ones = self.source, [")"]
        while True:
            yield from source.run(_PLAIN, pieces.append)
            char = yield from source.peek()
            if not char or char in "#\\":
                return False
            yield from source.literal(char)
            if char in _IN_STRING:
                is_raw = _RAW.search("".join(pieces[-2:])) is not None
                if not (yield from self._read_string(char, pieces, is_raw)):
                    return False
            elif char in _CLOSING:
                open_ones.append(_CLOSING[char])
                if len(open_ones) > _MAX_DEPTH:
                    return False
                pieces.append(char)
            elif char != open_ones.pop():
                return False
            elif not open_ones:
                return True
            else:
                pieces.append(char)

    def _read_string(self, quote: str, pieces: list[str], is_raw: bool) -> Reading[bool]:
        """A string whose first quote was read."""
        source, end = self.source, quote
        if (yield from source.literal(quote)):
            if not (yield from source.literal(quote)):
                pieces.append(quote * 2)
                return True
            end = quote * 3
        pieces.append(end)
        while True:
            yield from source.run(_IN_STRING[quote], pieces.append)
            if (yield from source.literal(end)):
                pieces.append(end)
                return True
            char = yield from source.peek()
            if not char or (char == "\n" and end == quote):
                return False
            yield from source.literal(char)
            if char != "\\":
                pieces.append(char)
                continue
            escaped = yield from source.peek()
            yield from source.literal(escaped)
            pieces.append("\\" + escaped if is_raw or escaped in _ESCAPED else "\\\\" + escaped)


class Olmo3Parser(PythonicParser):
    """`<function_calls>f(a=1)`, the next call on the next line, `</function_calls>`."""

    marks = ("<function_calls>",)

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        while (yield from self.read_one()):
            yield from source.blanks()
            if (yield from source.literal("</function_calls>")):
                source.begin()
                return
