"""Calls written as JSON: Hermes and Qwen, Llama 3, Mistral, Kimi K2, Granite, Phi-4-mini, InternLM."""

from __future__ import annotations

import random
import re
import string
from typing import ClassVar

from router.tool_parsers.call_form import CallForm
from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.sections import SectionParser
from router.tool_parsers.source import Reading

_CALL_ID = re.compile(r"[A-Za-z0-9_.:-]")


class HermesParser(ReadingParser):
    """`<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3."""

    marks = ("<tool_call>",)
    keeps_special_tokens = True
    form = CallForm(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
    )

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        yield from source.blanks()
        if (yield from self.read_call_object()):
            yield from self.read_ends("</tool_call>")


class Llama3JsonParser(ReadingParser):
    """`{"name": "f", "parameters": {"a": 1}}`, with `;` between several, maybe after `<|python_tag|>`: Llama 3.

    The object may be anywhere in the text, because only calls of known tools count.
    """

    marks = ("<|python_tag|>", "{")
    separators = ";"
    form = CallForm('{"name": "', '", "parameters": ', "}", separator="; ")

    def read_call(self, found: str) -> Reading[None]:
        if found != "{":
            yield from self.source.literal(found)
            yield from self.source.blanks()
        yield from self.read_call_object()


class MistralParser(ReadingParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, or since tokenizer 11 `[TOOL_CALLS]f[ARGS]{"a": 1}`, once
    per call, where `[CALL_ID]` may name the call and `[ARGS]` may be left out."""

    marks = ("[TOOL_CALLS]",)
    keeps_special_tokens = True
    _ID_CHARS: ClassVar[str] = string.ascii_letters + string.digits

    def new_id(self) -> str:
        return "".join(random.choices(self._ID_CHARS, k=9))  # the templates refuse any other length

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        yield from source.blanks()
        if (yield from source.literal("[")):
            yield from self.read_call_list()
            return
        name = yield from self.read_name()
        if name not in self.tools:
            return
        call_id = None
        if (yield from source.literal("[CALL_ID]")):
            call_id = yield from self.read_name(_CALL_ID)
        yield from source.literal("[ARGS]")
        yield from source.blanks()
        yield from self.read_arguments(name, call_id)


class KimiK2Parser(SectionParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`, several within
    `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. The model's ids count the calls of a conversation,
    and its template says the names of functions with nothing else."""

    marks = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    ends = ("<|tool_call_end|>", "<|tool_calls_section_end|>")

    def id_of(self, prompt: str, name: str, index: int) -> str:
        return f"functions.{name}:{prompt.count(self.marks[1]) + index}"

    def read_name_and_arguments(self) -> Reading[bool]:
        source = self.source
        yield from source.blanks()
        call_id = yield from self.read_name(_CALL_ID)
        yield from source.blanks()
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        if name not in self.tools or not (yield from source.literal("<|tool_call_argument_begin|>")):
            return False
        yield from source.blanks()
        return (yield from self.read_arguments(name, call_id))


class _ListParser(ReadingParser):
    """One of `marks`, and calls as objects in a list."""

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        yield from source.blanks()
        if (yield from source.literal("[")):
            yield from self.read_call_list()


class GraniteParser(_ListParser):
    """`<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]`, or `<tool_call>` instead: Granite 3."""

    marks = ("<|tool_call|>", "<tool_call>")
    keeps_special_tokens = True


class Phi4MiniJsonParser(_ListParser):
    """`functools[{"name": "f", "arguments": {"a": 1}}]`."""

    marks = ("functools",)
    form = CallForm('{"name": "', '", "arguments": ', "}", separator=", ", opening="functools[", closing="]")


class InternLmParser(ReadingParser):
    """`<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>`: InternLM 2.5 and 3."""

    marks = ("<|action_start|>",)
    keeps_special_tokens = True

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        yield from source.literal(found)
        yield from source.blanks()
        if not (yield from source.literal("<|plugin|>")):
            return
        yield from source.blanks()
        if (yield from self.read_call_object()):
            yield from self.read_ends("<|action_end|>")
