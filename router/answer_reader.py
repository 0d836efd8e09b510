"""Parts an answer's text into reasoning, content and tool calls, with the parsers that the router was started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.structural_tag import Format
from router.reasoning_parsers import ReasoningDelta, ReasoningParser
from router.tool_parsers import Content, Piece, ToolParser, Tools, merge


@dataclass(frozen=True, slots=True)
class Parsers:
    """Of all requests. `auto_tool_choice`: models may decide to call tools; otherwise requests with tools are refused,
    unless they forbid calls."""

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    auto_tool_choice: bool = False

    @property
    def may_call_tools(self) -> bool:
        return self.tool is not None and self.auto_tool_choice


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of an answer, in its order: reasoning comes first."""

    reasoning: str
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers to one request are read. `tools`: those that may be called, if any; of a request without
    `parallel_tool_calls`, an answer's first call is kept. `prompt`: the chat as the template wrote it. `call_parser`:
    of answers that are constrained to call tools, which need no flags; `is_named`: they call the one that was named."""

    parsers: Parsers
    prompt: str
    tools: Tools
    parallel_tool_calls: bool = True
    call_parser: type[ToolParser] | None = None
    is_named: bool = False

    @property
    def is_needed(self) -> bool:
        return self._tool_parser is not None or self.parsers.reasoning is not None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must have its special tokens, because a parser looks for them."""
        used = (self._tool_parser, self.parsers.reasoning)
        return any(parser is not None and parser.keeps_special_tokens for parser in used)

    def reader(self) -> AnswerReader:
        """A fresh one, for one answer."""
        reasoning = self.parsers.reasoning
        return AnswerReader(
            self._tool_parser(self.tools) if self._tool_parser else None,
            reasoning(self.prompt) if reasoning else None,
            self.parallel_tool_calls,
        )

    def reasoning_format(self) -> Format | None:
        """See ReasoningParser.format."""
        return self.parsers.reasoning(self.prompt).format() if self.parsers.reasoning else None

    @property
    def _tool_parser(self) -> type[ToolParser] | None:
        if self.call_parser is not None:
            return self.call_parser
        return self.parsers.tool if self.tools and self.parsers.may_call_tools else None


class AnswerReader:
    """One answer: `read` each piece of its text, the last one with `ended`."""

    def __init__(self, tool: ToolParser | None, reasoning: ReasoningParser | None, parallel_tool_calls: bool) -> None:
        self._tool = tool
        self._reasoning = reasoning
        self._parallel_tool_calls = parallel_tool_calls

    def read(self, text: str, ended: bool) -> AnswerDelta:
        parted = self._part(text, ended)
        if self._tool is None:
            return AnswerDelta(parted.reasoning, [Content(parted.content)] if parted.content else [])
        pieces = self._tool.feed(parted.content) if parted.content else []
        if ended:
            pieces = [*pieces, *self._tool.finish()]
        return AnswerDelta(parted.reasoning, merge(piece for piece in pieces if self._is_kept(piece)))

    def _part(self, text: str, ended: bool) -> ReasoningDelta:
        if self._reasoning is None:
            return ReasoningDelta(content=text)
        parted = self._reasoning.feed(text) if text else ReasoningDelta()
        if not ended:
            return parted
        rest = self._reasoning.finish()
        return ReasoningDelta(parted.reasoning + rest.reasoning, parted.content + rest.content)

    def _is_kept(self, piece: Piece) -> bool:
        return self._parallel_tool_calls or isinstance(piece, Content) or piece.index == 0
