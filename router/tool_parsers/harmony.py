"""OpenAI's harmony format, in which gpt-oss writes: messages with a header, of which an answer may have several.

`<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>`, where the
recipient may also stand before the channel. The template has written the beginning of the first header. The rules for
headers are those of the library `openai-harmony` (`StreamableParser`), which parses tokens: text is what we have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from router.tool_parsers.reader import ReadingParser
from router.tool_parsers.source import Reading, Source

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Of a message. The last two end the answer as well, and then are not part of its text."""
RECIPIENT = " to="

_HEADER_MARKS = (CHANNEL, CONSTRAIN, MESSAGE)
_IN_HEADER = re.compile(r"[^<\r\n]")
_MAX_PART_CHARS = 256
_MAX_PARTS = 8
_CHANNEL = re.compile(re.escape(CHANNEL) + r"[ \t]*([A-Za-z]+)")
_RECIPIENT = re.compile(r"(?:^|[ \t>])(?:to=|(?=functions\.))([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Header:
    """`recipient`: the tool that a message is for, with its namespace; nothing if it is for the user."""

    channel: str = ""
    recipient: str = ""


def parse_header(text: str) -> Header:
    """The part of a message before `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return Header(channel.group(1) if channel else "", recipient.group(1) if recipient else "")


def read_header(source: Source, begun: str = "") -> Reading[Header | None]:
    """Read a header with its `<|message|>`, of which `begun` was read; None: it is not one."""
    pieces = [begun]
    yield from source.literal(START)
    for _ in range(_MAX_PARTS):
        pieces.append((yield from source.text_of(_IN_HEADER, _MAX_PART_CHARS)))
        mark = yield from _mark(source)
        if mark == MESSAGE:
            return parse_header("".join(pieces))
        if not mark:
            return None
        pieces.append(mark)
    return None


def _mark(source: Source) -> Reading[str]:
    for mark in _HEADER_MARKS:
        if (yield from source.literal(mark)):
            return mark
    return ""


class GptOssParser(ReadingParser):
    """The messages to known tools, on any channel. Other messages stay content, with their marks: they are the business
    of the reasoning parser of the same name, which leaves messages to tools as they are."""

    marks = (START, CHANNEL, RECIPIENT)
    keeps_special_tokens = True
    _NAMESPACE: ClassVar[str] = "functions."

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        header = yield from read_header(source)
        name = header.recipient.removeprefix(self._NAMESPACE) if header else ""
        if name not in self.tools:
            return
        yield from source.blanks()
        if (yield from source.peek()) in ("", "<"):
            self.start_call(name)("{}")  # a message without text calls a tool without parameters
        elif not (yield from self.read_arguments(name)):
            return
        source.begin()
        yield from source.blanks()
        for end in ENDS:
            if (yield from source.literal(end)):
                source.begin()
                return
