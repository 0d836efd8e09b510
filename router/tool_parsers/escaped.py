"""Arguments as Gemma's control tokens delimit them: `{city:<escape>Köln<escape>,days:3,near:[<escape>a<escape>]}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.tool_parsers.json_text import MAX_DEPTH, VALID_WORD, Emit
from router.tool_parsers.schemas import SchemaPart
from router.tool_parsers.source import Reading, Source
from router.tool_parsers.values import dump, typed

_MAX_KEY_CHARS = 1024
_MAX_WORD_CHARS = 512
_IN_KEY = re.compile(r"[^:,{}\[\]<>\s]")
_IN_WORD = re.compile(r"[^,{}\[\]<>\n]")


@dataclass(frozen=True, slots=True)
class EscapedArguments:
    """Of a call whose parameters `schema` describes. `quote` stands before and after each string."""

    quote: str
    schema: Mapping[str, object]

    def read(self, source: Source, emit: Emit, begun: Callable[[], None]) -> Reading[bool]:
        """Read them, and emit their JSON. False: they are not of the form. `begun` is called after the first name, or
        at the end."""
        return (yield from self._object(source, emit, SchemaPart(self.schema, self.schema), 0, begun))

    def _object(
        self, source: Source, emit: Emit, schema: SchemaPart, depth: int, begun: Callable[[], None] | None = None
    ) -> Reading[bool]:
        if depth >= MAX_DEPTH or not (yield from source.literal("{")):
            return False
        emit("{")
        separator = ""
        while True:
            yield from source.blanks()
            if (yield from source.literal("}")):
                if begun:
                    begun()
                emit("}")
                return True
            key = yield from self._key(source)
            if key is None:
                return False
            if begun:
                begun()
                begun = None
            emit(f"{separator}{dump(key)}: ")
            if not (yield from self._value(source, emit, schema.member(key), depth + 1)):
                return False
            yield from source.blanks()
            yield from source.literal(",")  # models forget it
            separator = ", "

    def _array(self, source: Source, emit: Emit, schema: SchemaPart, depth: int) -> Reading[bool]:
        if depth >= MAX_DEPTH or not (yield from source.literal("[")):
            return False
        emit("[")
        items, separator = schema.item(), ""
        while True:
            yield from source.blanks()
            if (yield from source.literal("]")):
                emit("]")
                return True
            emit(separator)
            if not (yield from self._value(source, emit, items, depth + 1)):
                return False
            yield from source.blanks()
            if (yield from source.peek()) != "]" and not (yield from source.literal(",")):
                return False
            separator = ", "

    def _key(self, source: Source) -> Reading[str | None]:
        if (yield from source.literal(self.quote)):
            pieces: list[str] = []
            if not (yield from self._until_quote(source, pieces.append)):
                return None
            key = "".join(pieces)
        else:
            key = yield from source.text_of(_IN_KEY, _MAX_KEY_CHARS)
        yield from source.blanks()
        return key if key and (yield from source.literal(":")) else None

    def _value(self, source: Source, emit: Emit, schema: SchemaPart, depth: int) -> Reading[bool]:
        yield from source.blanks()
        char = yield from source.peek()
        if char == "{":
            return (yield from self._object(source, emit, schema, depth))
        if char == "[":
            return (yield from self._array(source, emit, schema, depth))
        if (yield from source.literal(self.quote)):
            return (yield from self._string(source, emit, schema))
        word = (yield from source.text_of(_IN_WORD, _MAX_WORD_CHARS)).strip()
        if not word and char not in (",", "}"):  # models forget a value, too
            return False
        kinds = schema.kinds()
        emit(word if not kinds and VALID_WORD.fullmatch(word) else typed(word, kinds))
        return True

    def _string(self, source: Source, emit: Emit, schema: SchemaPart) -> Reading[bool]:
        """Emit a string as it comes. A value of another type, which models write as a string too, waits for its end."""
        kinds = schema.kinds()
        if kinds and "string" not in kinds:
            pieces: list[str] = []
            whole = yield from self._until_quote(source, pieces.append)
            emit(typed("".join(pieces), kinds))
            return whole
        emit('"')
        if not (yield from self._until_quote(source, lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))):
            return False
        emit('"')
        return True

    def _until_quote(self, source: Source, emit: Emit) -> Reading[bool]:
        end = yield from source.until((self.quote,), re.compile(re.escape(self.quote)), emit)
        return end is not None and (yield from source.literal(end))
