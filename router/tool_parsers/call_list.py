"""Calls as one JSON list, the form of constrained answers of models whose own form is no CallForm."""

from __future__ import annotations

from collections.abc import Callable

from router.tool_parsers.base import Tools
from router.tool_parsers.call_form import CallForm
from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading


class CallListParser(ReadingParser):
    """`[{"name": "f", "parameters": {"a": 1}}, ...]`, as in vLLM."""

    marks = ("[",)
    form = CallForm('{"name": "', '", "parameters": ', "}", ", ", "[", "]")

    def __init__(self, tools: Tools, id_of: Callable[[str, int], str] | None = None) -> None:
        """`id_of`: the ids of calls, by their names and indices."""
        super().__init__(tools)
        self._id_of = id_of

    def start_call(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        return super().start_call(name, self._id_of(name, self.num_calls) if self._id_of else call_id)

    def read_call(self, found: str) -> Reading[None]:
        yield from self.source.literal(found)
        yield from self.read_call_list()
