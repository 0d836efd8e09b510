"""Streamed messages: `message_start`, the content blocks one after another, `message_delta`, `message_stop`."""

from __future__ import annotations

import json
from typing import Any

from router.generation import Generation
from router.http.anthropic.shape import SIGNATURE, TEXT, THINKING, MessageShape, tool_use
from router.http.shapes import timings_of
from router.text.answer import Delta
from router.tool_parsers import CallArguments, CallStart, Content, Part, Thought


def event(kind: str, **content: Any) -> bytes:
    """An event, whose name is its type."""
    data = json.dumps({"type": kind, **content}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class ContentBlocks:
    """Numbers the content blocks of a message and writes their events. At most one block is open."""

    def __init__(self) -> None:
        self._open: dict[str, Any] | None = None
        self._index = -1

    def begin(self, block: dict[str, Any]) -> bytes:
        """A block that begins as `block`, after the open one; nothing if it is the open one."""
        if block == self._open:
            return b""
        closed = self.close()
        self._open = block
        self._index += 1
        return closed + event("content_block_start", index=self._index, content_block=block)

    def write(self, block: dict[str, Any], delta: dict[str, Any]) -> bytes:
        """A piece of a block that begins as `block`."""
        return self.begin(block) + self._delta(delta)

    def close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == THINKING else b""
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)


class MessageEvents:
    """One message. Its end waits for the usage and the timings."""

    keep_alive = event("ping")

    def __init__(self, generation: Generation, shape: MessageShape) -> None:
        self._generation = generation
        self._shape = shape
        self._blocks = ContentBlocks()
        self._call: dict[str, Any] = {}
        """The last one: a call ends before the next one begins."""
        self._stop: dict[str, str | None] = {}

    def begin(self) -> bytes:
        return event("message_start", message=self._shape.begun(self._generation.usage))

    def delta(self, delta: Delta) -> bytes:
        parts = self._shape.read(delta)
        if delta.finish_reason:
            self._stop = self._shape.stop_of(delta)
        return b"".join(map(self._part, parts))

    def end(self) -> bytes:
        usage, timings = self._shape.usage(self._generation.usage), timings_of(self._generation.timings)
        ended = event("message_delta", delta=self._stop, usage=usage, **timings)
        return self._blocks.close() + ended + event("message_stop")

    def _part(self, part: Part) -> bytes:
        match part:
            case Thought(text):
                return self._blocks.write(THINKING, {"type": "thinking_delta", "thinking": text})
            case Content(text):
                return self._blocks.write(TEXT, {"type": "text_delta", "text": text})
            case CallStart():
                self._call = tool_use(part)
                return self._blocks.begin(self._call)
            case CallArguments(_, text):
                return self._blocks.write(self._call, {"type": "input_json_delta", "partial_json": text})

    def error(self, body: dict[str, Any]) -> bytes:
        return event("error", **{name: value for name, value in body.items() if name != "type"})
