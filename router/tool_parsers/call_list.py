"""Calls as one JSON list, the form of constrained answers of models whose own form is no CallForm."""

from __future__ import annotations

from router.tool_parsers.call_form import CallForm
from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading


class CallListParser(ReadingParser):
    """`[{"name": "f", "parameters": {"a": 1}}, ...]`, as in vLLM."""

    marks = ("[",)
    form = CallForm('{"name": "', '", "parameters": ', "}", ", ", "[", "]")

    def read_call(self, found: str) -> Reading[None]:
        yield from self.source.literal(found)
        yield from self.read_call_list()
