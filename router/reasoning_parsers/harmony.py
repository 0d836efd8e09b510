"""Reasoning in OpenAI's harmony format: gpt-oss."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from router.reasoning_parsers.base import ReasoningDelta, ReasoningParser
from router.tool_parsers.harmony import CHANNEL, ENDS, MESSAGE, RECIPIENT, START, Header, parse_header, read_header
from router.tool_parsers.source import Reading, Source, any_of

_BEGINNINGS = (START, CHANNEL, MESSAGE, *ENDS)
_BEGINNING = any_of(_BEGINNINGS)
_BODY_ENDS = (*ENDS, START + "assistant")  # models forget `<|end|>`
_BODY_END = any_of(_BODY_ENDS)
_BROKEN_HEADER = re.compile(r"(?:<\|start\|>[a-z]*)?(?:<\|channel\|>[ \t]*([A-Za-z]*)[ \t]*)?")
"""What a header without `<|message|>` says. Text follows, as in the library's lenient mode."""


class GptOssParser(ReasoningParser):
    """Messages on the channel `analysis` are reasoning; those on `commentary` and `final` are content. Line breaks join
    several, as in vLLM. Messages to tools are content as they were written, for the tool parser."""

    keeps_special_tokens = True

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self._source = Source()
        self._turns = _Turns()
        self._reasoning = _Joined(self._turns.think)
        self._content = _Joined(self._turns.say)
        self._run = self._read()

    def feed(self, text: str) -> ReasoningDelta:
        self._source.add(text)
        return self._go_on()

    def finish(self) -> ReasoningDelta:
        self._source.end()
        return self._go_on()

    def _go_on(self) -> ReasoningDelta:
        next(self._run, None)
        return self._turns.take()

    def _read(self) -> Reading[None]:
        source = self._source
        if opened := _opened(self.prompt):
            yield from self._read_body(opened)
        source.begin()
        if (yield from source.literal(RECIPIENT)):
            yield from self._read_message(RECIPIENT)
        source.forget()
        while found := (yield from source.until(_BEGINNINGS, _BEGINNING, self._content.add)):
            if found in ENDS:
                yield from source.literal(found)
            else:
                source.begin()
                yield from self._read_message()

    def _read_message(self, begun: str = "") -> Reading[None]:
        header = yield from read_header(self._source, begun)
        text = self._source.taken()
        self._source.forget()
        if header is None:
            broken = _BROKEN_HEADER.match(text)
            assert broken  # the pattern matches nothing, too
            yield from self._read_body(Header(broken.group(1) or ""), text[broken.end() :])
        else:
            yield from self._read_body(header, text if _is_for_tool(header) else "")

    def _read_body(self, header: Header, begun: str = "") -> Reading[None]:
        add = self._sink(header)
        add(begun)
        end = yield from self._source.until(_BODY_ENDS, _BODY_END, add)
        if end in ENDS:
            yield from self._source.literal(end)
            if _is_for_tool(header):
                add(end)

    def _sink(self, header: Header) -> Callable[[str], None]:
        if _is_for_tool(header):
            return self._content.add_plainly
        joined = self._reasoning if header.channel == "analysis" else self._content
        joined.begin()
        return joined.add


class _Turns:
    """Reasoning and content in the order in which they come."""

    def __init__(self) -> None:
        self._turns: list[tuple[list[str], list[str]]] = []

    def think(self, text: str) -> None:
        if not self._turns or self._turns[-1][1]:
            self._turns.append(([], []))
        self._turns[-1][0].append(text)

    def say(self, text: str) -> None:
        if not self._turns:
            self._turns.append(([], []))
        self._turns[-1][1].append(text)

    def take(self) -> ReasoningDelta:
        if not self._turns:
            return ReasoningDelta()
        first, *later = [ReasoningDelta("".join(thought), "".join(said)) for thought, said in self._turns]
        self._turns.clear()
        return dataclasses.replace(first, later=tuple(later))


class _Joined:
    """The text of messages, with a line break between two that have any. `put` takes it."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._has_text = False
        self._separator = ""

    def begin(self) -> None:
        """The next message begins."""
        self._separator = "\n" if self._has_text else ""

    def add(self, text: str) -> None:
        if text:
            self._put(self._separator + text)
            self._separator, self._has_text = "", True

    def add_plainly(self, text: str) -> None:
        if text:
            self._put(text)


def _is_for_tool(header: Header) -> bool:
    return header.recipient not in ("", "all")


def _opened(prompt: str) -> Header | None:
    """The header of a message that the prompt begins and the answer goes on with, if any."""
    header, message, body = prompt.rpartition(START)[2].partition(MESSAGE)
    if not message or any(end in body for end in ENDS):
        return None
    return parse_header(header)
