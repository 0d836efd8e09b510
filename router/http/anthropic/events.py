"""Streamed messages: `message_start`, the content blocks one after another, `message_delta`, `message_stop`."""

from __future__ import annotations

import json
from typing import Any

from router.answer import Delta
from router.generation import Generation
from router.http.anthropic.shape import TEXT, MessageShape, stop_of, usage_of
from router.http.shapes import timings_of


def event(kind: str, **content: Any) -> bytes:
    """An event, whose name is its type."""
    data = json.dumps({"type": kind, **content}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class ContentBlocks:
    """Numbers the content blocks of a message and writes their events. At most one block is open."""

    def __init__(self) -> None:
        self._open: dict[str, Any] | None = None
        self._index = -1

    def write(self, block: dict[str, Any], delta: dict[str, Any]) -> bytes:
        """A piece of a block that began as `block`. Any other block than the open one begins after it."""
        begun = b""
        if block != self._open:
            begun = self.close()
            self._open = block
            self._index += 1
            begun += event("content_block_start", index=self._index, content_block=block)
        return begun + event("content_block_delta", index=self._index, delta=delta)

    def close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event("content_block_stop", index=self._index)


class MessageEvents:
    """One message. Its end waits for the usage and the timings."""

    keep_alive = event("ping")

    def __init__(self, generation: Generation, shape: MessageShape) -> None:
        self._generation = generation
        self._shape = shape
        self._blocks = ContentBlocks()
        self._stop: dict[str, str | None] = {}

    def begin(self) -> bytes:
        return event("message_start", message=self._shape.begun(self._generation.usage))

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason:
            self._stop = stop_of(delta)
        return self._blocks.write(TEXT, {"type": "text_delta", "text": delta.text}) if delta.text else b""

    def end(self) -> bytes:
        usage, timings = usage_of(self._generation.usage), timings_of(self._generation.timings)
        ended = event("message_delta", delta=self._stop, usage=usage, **timings)
        return self._blocks.close() + ended + event("message_stop")

    def error(self, body: dict[str, Any]) -> bytes:
        return event("error", **{name: value for name, value in body.items() if name != "type"})
