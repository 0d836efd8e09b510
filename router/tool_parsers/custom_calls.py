"""Calls of custom tools, whose input is a text. Models are shown functions that take it as one string, `input`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from router.tool_parsers.json_text import mark, read_text, read_value
from router.tool_parsers.pieces import CallArguments, CallStart, Piece
from router.tool_parsers.source import Reading, Source

INPUT = "input"
"""The only argument of these functions."""
_ALL = re.compile(r"(?s:.*)")


class CustomCalls:
    """Those of one answer: the calls of `names` get their input in place of the arguments."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._inputs: dict[int, _Input] = {}

    def read(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallStart) and piece.name in self._names:
                self._inputs[piece.index] = _Input()
                found.append(replace(piece, is_custom=True))
            elif isinstance(piece, CallArguments) and piece.index in self._inputs:
                if text := self._inputs[piece.index].read(piece.text):
                    found.append(CallArguments(piece.index, text, is_custom=True))
            else:
                found.append(piece)
        return found


class _Input:
    """One call's input, from the text of its arguments. Of another value than a string it is the JSON, and of arguments
    that do not begin with the input it is their JSON: a model that wrote that meant something by it."""

    def __init__(self) -> None:
        self._source = Source()
        self._out: list[str] = []
        self._run = self._read()

    def read(self, text: str) -> str:
        self._source.add(text)
        next(self._run, None)
        found = "".join(self._out)
        self._out.clear()
        return found

    def _read(self) -> Reading[None]:
        source = self._source
        source.begin()
        yield from mark(source, "{", _ignore)
        yield from source.blanks()
        name = yield from read_text(source)
        if name == INPUT and (yield from mark(source, ":", _ignore)):
            yield from source.blanks()
            source.forget()
            is_text = (yield from source.peek()) == '"'
            yield from read_value(source, self._add_characters if is_text else self._out.append)
            yield from source.run(_ALL, _ignore)
        elif name is not None or (yield from source.peek()) != "}":
            self._out.append(source.taken())
            source.forget()
            yield from source.run(_ALL, self._out.append)

    def _add_characters(self, part: str) -> None:
        """Of a string of JSON: whole characters and escapes, one of its quotes, or an escape that is none."""
        if part == '"':
            return
        try:
            self._out.append(json.loads(f'"{part}"'))
        except ValueError:
            self._out.append(part)


def _ignore(_: str) -> None:
    pass
