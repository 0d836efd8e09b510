"""Splits an answer's text into reasoning, content and tool calls, with the parsers that the router was started with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.structured_output.structural_tag import Format
from router.reasoning_parsers import ReasoningDelta, ReasoningMarks, ReasoningParser
from router.text.answer import Delta
from router.tool_parsers import (
    CallListParser,
    CallStart,
    Content,
    CustomCalls,
    Part,
    Piece,
    Thought,
    ToolParser,
    Tools,
    merge,
)


@dataclass(frozen=True, slots=True)
class Parsers:
    """Of all requests. `auto_tool_choice`: models may decide to call tools; otherwise requests with tools are refused,
    unless they forbid calls. `hides_forbidden_tools`: models are not shown the tools of requests that forbid calls."""

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    auto_tool_choice: bool = False
    hides_forbidden_tools: bool = False

    def shows_tools(self, choice: object) -> bool:
        """choice: a request's `tool_choice`."""
        return not (self.hides_forbidden_tools and choice == "none")

    @property
    def may_call_tools(self) -> bool:
        return self.tool is not None and self.auto_tool_choice


@dataclass(slots=True)
class AnswerReading:
    """How the answers to one request are read. `tools`: those that may be called, if any; of a request without
    `parallel_tool_calls`, an answer's first call is kept. `prompt`: the chat as the template wrote it. `call_parser`:
    of answers that are constrained to call tools, which need no flags; `is_named`: they call the one that was named.
    `begun`: the text with which the prompt has begun the answer's message; None: it has not. `custom`: the names of
    tools whose calls have an input."""

    parsers: Parsers
    prompt: str
    tools: Tools
    parallel_tool_calls: bool = True
    call_parser: type[ToolParser] | None = None
    is_named: bool = False
    begun: str | None = None
    custom: Collection[str] = ()
    _reasoning: ReasoningParser | None = field(init=False)
    """Says what all answers need, and then parts the first one."""
    _keeps_to_format: bool = field(default=False, init=False)
    _readers: list[AnswerReader] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._reasoning = self._new_reasoning() if self.parsers.reasoning is not None else None

    @property
    def is_needed(self) -> bool:
        return self._tool_parser is not None or self.parts_reasoning

    @property
    def parts_reasoning(self) -> bool:
        """Whether the router looks for reasoning. Then an answer is read piece by piece, so that it can be counted."""
        return self.parsers.reasoning is not None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of what all readers have read; None: the router does not look for reasoning."""
        return sum(reader.num_reasoning_tokens for reader in self._readers) if self.parts_reasoning else None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must have its special tokens, because a parser looks for them."""
        used = (self._tool_parser, self._reasoning)
        return any(parser is not None and parser.keeps_special_tokens for parser in used)

    def reader(self) -> AnswerReader:
        """A fresh one, for one answer."""
        reasoning = self._new_reasoning() if self._readers else self._reasoning
        custom = CustomCalls(self.custom) if self.custom else None
        reader = AnswerReader(self._tool_maker(), reasoning, self.parallel_tool_calls, custom)
        self._readers.append(reader)
        return reader

    def reasoning_format(self) -> Format | None:
        """See ReasoningParser.format. Before any reader."""
        return self._reasoning.format() if self._reasoning else None

    def reasoning_marks(self) -> ReasoningMarks | None:
        """See ReasoningParser.marks. Before any reader."""
        return self._reasoning.marks() if self._reasoning else None

    def keep_to_format(self) -> None:
        """See ReasoningParser.keep_to_format. Before any reader."""
        self._keeps_to_format = True
        self._reasoning = self._new_reasoning()

    def _tool_maker(self) -> Callable[[], ToolParser] | None:
        kind, own = self._tool_parser, self.parsers.tool
        if kind is CallListParser and own is not None:
            return lambda: CallListParser(self.tools, functools.partial(own(self.tools).id_of, self.prompt))
        return kind and functools.partial(kind, self.tools)

    def _new_reasoning(self) -> ReasoningParser | None:
        kind = self.parsers.reasoning
        if kind is None:
            return None
        parser = kind(self.prompt) if self.begun is None else kind.continuing(self.prompt, self.begun)
        if parser is not None and self._keeps_to_format:
            parser.keep_to_format()
        return parser

    @property
    def _tool_parser(self) -> type[ToolParser] | None:
        if self.call_parser is not None:
            return self.call_parser
        return self.parsers.tool if self.tools and self.parsers.may_call_tools else None


class AnswerReader:
    """One answer: `read` each piece of its text, the last one with `ended`. `tool` makes a parser of calls; `custom`
    changes those of custom tools.

    The tokens of a piece count for the first part that it shows; of a piece that shows none, with those of the next.
    """

    def __init__(
        self,
        tool: Callable[[], ToolParser] | None,
        reasoning: ReasoningParser | None,
        parallel_tool_calls: bool,
        custom: CustomCalls | None = None,
    ) -> None:
        self.num_reasoning_tokens = 0
        self._num_pending = 0  # tokens that have shown nothing yet
        self._new_tool = tool
        self._tool = tool() if tool else None
        self._tool_has_read = False
        self._num_calls = 0
        self._num_earlier_calls = 0  # of the parsers before this one
        self._ids: set[str] = set()  # of the calls
        self._reasoning = reasoning
        self._parallel_tool_calls = parallel_tool_calls
        self._custom = custom

    def read(self, text: str, ended: bool, num_tokens: int = 0) -> list[Part]:
        """What is new, in the order of the text. `num_tokens`: those of the text."""
        parts: list[Part] = []
        for delta in self._parted(text, ended):
            if delta.reasoning:
                parts += self._end_calls()
                parts.append(Thought(delta.reasoning))
            if delta.content:
                parts += self._read_content(delta.content)
        if ended and self._tool is not None:
            parts += self._kept(self._tool.finish())
        self._count(num_tokens, parts)
        return merge(parts)

    def _count(self, num_tokens: int, parts: Sequence[Part]) -> None:
        self._num_pending += num_tokens
        if parts:
            if isinstance(parts[0], Thought):
                self.num_reasoning_tokens += self._num_pending
            self._num_pending = 0

    def _parted(self, text: str, ended: bool) -> Iterator[ReasoningDelta]:
        if self._reasoning is None:
            yield ReasoningDelta(content=text)
            return
        deltas = [self._reasoning.feed(text)] if text else []
        if ended:
            deltas.append(self._reasoning.finish())
        for delta in deltas:
            yield delta
            yield from delta.later

    def _read_content(self, text: str) -> Sequence[Part]:
        if self._tool is None:
            return [Content(text)]
        self._tool_has_read = True
        return self._kept(self._tool.feed(text))

    def _end_calls(self) -> Sequence[Part]:
        """Reasoning parts messages, and no call goes on in the next one: what comes then is for another parser."""
        if self._tool is None or self._new_tool is None or not self._tool_has_read:
            return ()
        pieces = self._kept(self._tool.finish())
        self._tool, self._tool_has_read = self._new_tool(), False
        self._num_earlier_calls = self._num_calls
        return pieces

    def _kept(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those that the client gets, with calls counted from the answer's beginning, each with an id of its own."""
        if self._num_earlier_calls:
            pieces = [
                piece if isinstance(piece, Content) else replace(piece, index=piece.index + self._num_earlier_calls)
                for piece in pieces
            ]
        self._num_calls += sum(isinstance(piece, CallStart) for piece in pieces)
        pieces = [replace(piece, id=self._own_id(piece)) if isinstance(piece, CallStart) else piece for piece in pieces]
        kept = [piece for piece in pieces if self._is_kept(piece)]
        return kept if self._custom is None else self._custom.read(kept)

    def _own_id(self, call: CallStart) -> str:
        """The call's id; another one if the model has given it to an earlier call, since results name calls by it."""
        assert self._tool is not None
        own, index = call.id, call.index
        while own in self._ids and index <= call.index + len(self._ids):
            own, index = self._tool.id_of("", call.name, index), index + 1
        self._ids.add(own)
        return own

    def _is_kept(self, piece: Piece) -> bool:
        return self._parallel_tool_calls or isinstance(piece, Content) or piece.index == 0


def parts_of(reader: AnswerReader | None, delta: Delta) -> Sequence[Part]:
    """What is new in an answer, in the order of its text: content, where nothing reads it."""
    if reader is None:
        return [Content(delta.text)] if delta.text else []
    return reader.read(delta.text, delta.finish_reason is not None, len(delta.token_ids))
