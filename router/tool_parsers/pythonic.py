"""Calls written as a Python list, `[f(a=1), g(b="x")]`: Llama 3.2 and 4, ToolACE. Only literals are read."""

from __future__ import annotations

import re
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading
from router.tool_parsers.values import call_arguments

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS = 256
_MAX_DEPTH = 64
_PLAIN = re.compile(r"[^'\"()\[\]{}#\\]*")
_ESCAPED = "\n\\'\"abfnrtvxuUN"
"""Characters to which Python gives a meaning after a backslash. Before others it warns, and keeps the backslash."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "'\""}


class PythonicParser(ReadingParser):
    """`<|python_start|>` and `<|python_end|>` may be around the list. A call is emitted as a whole."""

    _START: ClassVar[str] = "<|python_start|>"
    marks = (_START, "[")

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        if found == self._START:
            yield from source.literal(found)
            yield from source.blanks()
        if not (yield from source.literal("[")):
            return
        while (yield from self._read_one()):
            source.begin()
            yield from source.blanks()
            if (yield from source.literal("]")):
                source.begin()
                yield from source.blanks()
                if (yield from source.literal("<|python_end|>")):
                    source.begin()
                return
            if not (yield from source.literal(",")):
                return

    def _read_one(self) -> Reading[bool]:
        source = self.source
        yield from source.blanks()
        name = yield from source.text_of(_NAME, _MAX_NAME_CHARS)
        if name not in self.tools or not (yield from source.literal("(")):
            return False
        pieces: list[str] = []
        if not (yield from self._read_parentheses(pieces)):
            return False
        arguments = call_arguments("".join(pieces))
        if arguments is None:
            return False
        self.start_call(name)(arguments)
        return True

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
                pieces.append(char)
                if not (yield from self._read_string(char, pieces)):
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

    def _read_string(self, quote: str, pieces: list[str]) -> Reading[bool]:
        source = self.source
        while True:
            yield from source.run(_IN_STRING[quote], pieces.append)
            char = yield from source.peek()
            if not char or char == "\n":
                return False
            yield from source.literal(char)
            if char == quote:
                pieces.append(char)
                return True
            escaped = yield from source.peek()
            yield from source.literal(escaped)
            pieces.append("\\" + escaped if escaped in _ESCAPED else "\\\\" + escaped)
