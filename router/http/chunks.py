"""Streamed answers in OpenAI's form: one event per delta, then `[DONE]`."""

from __future__ import annotations

import json
from typing import Any

from router.answer import Delta
from router.generation import Generation
from router.http.schemas import StreamOptions
from router.http.shapes import Shape, timings_of, usage_of

_DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """The chunks of `shape`. The final chunk carries the timings, so the last chunk of the last answer waits for
    `end`."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, generation: Generation, shape: Shape, options: StreamOptions | None) -> None:
        self._generation = generation
        self._shape = shape
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._num_open = sum(len(part.answers) for part in generation.parts)
        self._last: dict[str, Any] | None = None

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        chunk = self._shape.chunk(delta)
        if chunk is None:
            return b""
        if self._usage_always:
            chunk["usage"] = usage_of(self._generation.usage)
        if delta.finish_reason:
            self._num_open -= 1
            if not self._num_open:
                self._last = chunk
                return b""
        return _event(chunk)

    def end(self) -> bytes:
        """The last chunk, and the chunk with the usage if it was asked for."""
        chunks = [self._last] if self._last else []
        if self._include_usage:
            chunks.append(self._shape.usage_chunk(self._generation.usage))
        if chunks:
            chunks[-1].update(timings_of(self._generation.timings))
        return b"".join(map(_event, chunks)) + _DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return _event(body)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
