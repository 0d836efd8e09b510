"""Calls written as markup, whose values have the types of the tool's schema: Qwen3-Coder, GLM-4.5."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.schemas import SchemaPart
from router.tool_parsers.source import Reading, any_of
from router.tool_parsers.values import typed

_BEFORE_END = re.compile(r"[^<>\n]")
_IN_KEY = re.compile(r"[^<>]")
_NULL_CHARS = len("\nnull\n")
JSON_KINDS = frozenset({"boolean", "integer", "number", "object", "array"})


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How a model writes values. `kinds` count if the tool's schema says nothing of a value's type. `is_verbatim`: a
    string is the text as it is, with line breaks around it. `may_be_null`: a string that the schema lets be null is
    that if it says so."""

    kinds: frozenset[str] = frozenset({"string", "null"})
    is_verbatim: bool = False
    may_be_null: bool = True


_WITH_LINE_BREAKS = ValueForm()


class Arguments:
    """Writes the JSON object of a call's arguments, one after the other. The call begins with the first of them."""

    def __init__(self, parser: ReadingParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._emit: Callable[[str], None] | None = None
        self._schema = SchemaPart(parser.tools[name], parser.tools[name])

    def value_of(self, key: str, form: ValueForm) -> _Value:
        """What takes the value's text."""
        opening = ", " if self._emit else "{"
        emit = self._begin()
        emit(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        kinds = self._schema.member(key).kinds() or form.kinds
        return _Value(emit, kinds if form.may_be_null else kinds - {"null"}, form.is_verbatim)

    def close(self) -> None:
        closing = "}" if self._emit else "{}"
        self._begin()(closing)
        self._parser.source.begin()

    def _begin(self) -> Callable[[str], None]:
        if self._emit is None:
            self._emit = self._parser.start_call(self._name)
        return self._emit


class _Value:
    """Writes the JSON of one value, whose text comes in pieces. A string goes on at once, but for the line break that
    may be the last character, and unless it may still be null; other values wait for their end. `is_verbatim`: a string
    is the text as it is, with line breaks around it."""

    def __init__(self, emit: Callable[[str], None], kinds: frozenset[str], is_verbatim: bool) -> None:
        self._emit = emit
        self._kinds = kinds
        self._is_string = "string" in kinds
        self._line_break = "" if is_verbatim and self._is_string else "\n"
        self._num_held = _NULL_CHARS if "null" in kinds else 0
        self._opened = False
        self._pieces: list[str] = []
        self._num_chars = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._is_string and (self._opened or self._num_chars > self._num_held):
            self._write_string()

    def close(self) -> None:
        text = "".join(self._pieces)
        if self._opened:
            self._emit(_escaped(text.removesuffix(self._line_break)) + '"')
        else:
            self._emit(typed(text.removeprefix(self._line_break).removesuffix(self._line_break), self._kinds))

    def _write_string(self) -> None:
        text = "".join(self._pieces)
        opening = "" if self._opened else '"'
        body = text if self._opened else text.removeprefix(self._line_break)
        self._opened = True
        held = self._line_break if body.endswith(self._line_break) else ""
        self._emit(opening + _escaped(body[: len(body) - len(held)]))
        self._pieces = [held]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class MarkupParser(ReadingParser):
    keeps_special_tokens = True

    def read_value(
        self,
        arguments: Arguments,
        key: str,
        ends: Sequence[str],
        pattern: re.Pattern[str],
        form: ValueForm = _WITH_LINE_BREAKS,
    ) -> Reading[str]:
        """Read an argument's value up to one of `ends`, which is returned; nothing: the text has ended."""
        value = arguments.value_of(key, form)
        self.source.forget()
        end = yield from self.source.until(ends, pattern, value.add)
        value.close()
        self.source.begin()
        return end or ""


class Qwen3CoderParser(MarkupParser):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, with line breaks between and around
    values. `<tool_call>` may be missing, as may the ends of parameters and functions."""

    marks = ("<tool_call>", "<function=")
    _CLOSING: ClassVar[str] = "</tool_call>"
    _ENDS: ClassVar[tuple[str, ...]] = ("</parameter>", "<parameter=", "</function>", _CLOSING)
    _END: ClassVar[re.Pattern[str]] = any_of(_ENDS)

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        if found == "<tool_call>":
            yield from source.literal(found)
            yield from source.blanks()
        if not (yield from source.literal("<function=")):
            return
        name = yield from self.read_name(_BEFORE_END)
        if name not in self.tools or not (yield from source.literal(">")):
            return
        arguments = Arguments(self, name)
        while (yield from self._read_parameter(arguments)):
            pass
        has_ended = yield from source.literal("</function>")
        if has_ended:
            arguments.close()
        yield from source.blanks()
        if (yield from source.literal(self._CLOSING)):
            if not has_ended:
                arguments.close()
            source.begin()

    def _read_parameter(self, arguments: Arguments) -> Reading[bool]:
        source = self.source
        yield from source.blanks()
        if not (yield from source.literal("<parameter=")):
            return False
        key = yield from self.read_name(_BEFORE_END)
        if not (yield from source.literal(">")):
            return False
        end = yield from self.read_value(arguments, key, self._ENDS, self._END)
        if end == "</parameter>":
            yield from source.literal(end)
            source.begin()
        return bool(end)


class Glm45Parser(MarkupParser):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, with line breaks between. The template
    writes strings as they are and all else as JSON."""

    marks = ("<tool_call>",)
    _FORM: ClassVar[ValueForm] = ValueForm(JSON_KINDS, is_verbatim=True)
    _ENDS: ClassVar[tuple[str, ...]] = ("</arg_value>",)
    _END: ClassVar[re.Pattern[str]] = any_of(_ENDS)

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        yield from source.blanks()
        name = (yield from self.read_name(_BEFORE_END)).rstrip()
        if name not in self.tools:
            return
        arguments = Arguments(self, name)
        while (yield from self._read_argument(arguments)):
            pass
        if (yield from source.literal("</tool_call>")):
            arguments.close()

    def _read_argument(self, arguments: Arguments) -> Reading[bool]:
        source = self.source
        yield from source.blanks()
        if not (yield from source.literal("<arg_key>")):
            return False
        key = yield from self.read_name(_IN_KEY)
        if not (yield from source.literal("</arg_key>")):
            return False
        yield from source.blanks()
        if not (yield from source.literal("<arg_value>")):
            return False
        end = yield from self.read_value(arguments, key.strip(), self._ENDS, self._END, self._FORM)
        yield from source.literal(end)
        source.begin()
        return bool(end)
