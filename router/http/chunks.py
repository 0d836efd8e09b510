"""Streamed answers in OpenAI's form: one event per delta, then `[DONE]`, which comes after an error, too, as with vLLM:
some clients wait for it."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

import pydantic_core

from router.generation import Generation
from router.http.schemas import StreamOptions
from router.http.shapes import Shape, timings_of
from router.text.answer import Delta

DONE = b"data: [DONE]\n\n"
_MARK = "\x00the delta's text\x00"
"""Stands for the text in a chunk of which the rest is to be used again. No name or id contains it."""


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
        self._plain: dict[int, tuple[str, str]] = {}
        """What comes before and after the text in a chunk of an answer that has begun, where nothing else changes."""

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        plain = self._plain.get(delta.index)
        if plain is not None and delta.finish_reason is None:
            return f"{plain[0]}{encode_basestring(delta.text)}{plain[1]}".encode()
        return self._rendered(delta)

    def _rendered(self, delta: Delta) -> bytes:
        chunk = self._shape.chunk(delta)
        if chunk is None:
            return b""
        if self._usage_always:
            chunk["usage"] = self._shape.usage(self._generation.usage)
        if delta.finish_reason:
            self._num_open -= 1
            if not self._num_open:
                self._last = chunk
                return b""
        elif self._shape.only_text_changes and not self._usage_always:
            self._plain[delta.index] = self._around_text(delta.index)
        return event(chunk)

    def _around_text(self, index: int) -> tuple[str, str]:
        """Rendered once, by rendering a chunk with a mark for its text."""
        before, after = event(self._shape.chunk(Delta(index, _MARK))).decode().split(encode_basestring(_MARK))
        return before, after

    def end(self) -> bytes:
        """The last chunk, and the chunk with the usage if it was asked for."""
        chunks = [self._last] if self._last else []
        if self._include_usage:
            chunks.append(self._shape.usage_chunk(self._generation.usage))
        if chunks:
            chunks[-1].update(timings_of(self._generation.timings))
        return b"".join(map(event, chunks)) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body) + DONE


def event(content: dict[str, Any] | None) -> bytes:
    return b"data: %b\n\n" % pydantic_core.to_json(content, inf_nan_mode="constants")
