"""Calls as Gemma writes them: FunctionGemma, Gemma 4 and Gemma 3, which is told a form in its prompt."""

from __future__ import annotations

from typing import ClassVar

from router.tool_parsers.escaped import EscapedArguments
from router.tool_parsers.pythonic import PythonicParser
from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading


class _ControlTokenParser(ReadingParser):
    """`call:f{a:1}` between two control tokens."""

    keeps_special_tokens = True
    call_start: ClassVar[str]
    call_end: ClassVar[str]
    response_start: ClassVar[str]
    """Ends the answer: the result of the call would come next."""
    quote: ClassVar[str]

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(self.call_start)
        yield from source.blanks()
        if not (yield from source.literal("call:")):
            return
        name = yield from self.read_name()
        if name not in self.tools:
            return
        yield from source.blanks()
        if (yield from self.read_arguments(name, read=EscapedArguments(self.quote, self.tools[name]).read)):
            yield from self.read_ends(self.call_end, self.response_start)


class Gemma4Parser(_ControlTokenParser):
    """`<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>`."""

    call_start, call_end, response_start, quote = "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'
    marks = (call_start,)


class GemmaParser(_ControlTokenParser, PythonicParser):
    """`<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>`: FunctionGemma. And what Google's prompts
    ask Gemma 3 for: Python or JSON calls, of which several may be in a list, alone or in a fence, maybe in `print`."""

    call_start, call_end = "<start_function_call>", "<end_function_call>"
    response_start, quote = "<start_function_response>", "<escape>"
    _FENCES: ClassVar[tuple[str, ...]] = ("```tool_code", "```json")
    _FENCE_END: ClassVar[str] = "```"
    _MODULE: ClassVar[str] = "default_api."
    marks = (call_start, *_FENCES, "[", "{")

    def read_call(self, found: str) -> Reading[None]:
        if found == self.call_start:
            yield from _ControlTokenParser.read_call(self, found)
        elif found in self._FENCES:
            yield from self._read_fence(found)
        else:
            yield from self._read_statement(found)

    def _read_fence(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        while True:
            yield from source.blanks()
            char = yield from source.peek()
            if not (yield from self._read_statement(char)):
                return
            source.begin()
            yield from source.blanks()
            if (yield from source.literal(self._FENCE_END)):
                source.begin()
                return

    def _read_statement(self, char: str) -> Reading[bool]:
        source = self.source
        if char == "{":
            return (yield from self.read_call_object())
        if (yield from source.literal("[")):
            yield from source.blanks()
            in_json = (yield from source.peek()) == "{"
            return (yield from self.read_list(self.read_call_object if in_json else self.read_one))
        return (yield from self._read_printed())

    def _read_printed(self) -> Reading[bool]:
        name = yield from self.read_name()
        if name != "print" or name in self.tools:
            return (yield from self.read_named(name))
        if not (yield from self.source.literal("(")) or not (yield from self.read_one()):
            return False
        yield from self.source.blanks()
        return (yield from self.source.literal(")"))

    def known_name(self, name: str) -> str | None:
        return super().known_name(name) or super().known_name(name.removeprefix(self._MODULE))
