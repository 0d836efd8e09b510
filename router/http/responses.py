"""Sends a generation, whole or as server-sent events. If the client leaves, the generation is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from router.answer import Delta, join
from router.generation import Generation
from router.http.answers import json_response
from router.http.errors import body_of, response_to
from router.http.schemas import StreamOptions
from router.http.shapes import Shape, timings_of, usage_of
from router.offload import Offload

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": keep-alive\n\n"
_LOGPROBS_SIZE = 50
"""The cost of writing a token's logprobs, relative to a token."""
_DONE = b"data: [DONE]\n\n"


class WholeResponse(Response):
    """All answers at once."""

    def __init__(self, generation: Generation, shape: Shape, offload: Offload) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._offload = offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _closed_when_left(receive, self._generation):
            try:
                response = await self._answer(await self._collect())
            except BatonError as error:
                response = response_to(error)
        await response(scope, receive, send)

    async def _collect(self) -> dict[int, list[Delta]]:
        deltas: dict[int, list[Delta]] = {}
        while not self._generation.done:
            for delta in await self._generation.next():
                deltas.setdefault(delta.index, []).append(delta)
        return deltas

    async def _answer(self, deltas: dict[int, list[Delta]]) -> Response:
        every = [delta for of_answer in deltas.values() for delta in of_answer]
        size = sum(len(delta.token_ids) + _LOGPROBS_SIZE * len(delta.logprobs) for delta in every)

        def whole() -> dict[str, Any]:
            return self._shape.whole(self._generation, [join(deltas[index]) for index in sorted(deltas)])

        return await json_response(whole, size + self._generation.usage.num_prompt_tokens, self._offload)


class EventResponse(Response):
    """One event per delta, then `[DONE]`.

    The response begins with the first delta, so that an earlier error has its HTTP status. While the request is queued
    it begins after `keep_alive_s`, and sends a comment that often. A later error is an event, the last one.
    """

    def __init__(
        self, generation: Generation, shape: Shape, options: StreamOptions | None, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._keep_alive_s = keep_alive_s
        self._num_open = sum(len(part.answers) for part in generation.parts)
        self._last: dict[str, Any] | None = None  # the final answer's final chunk waits for the timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _closed_when_left(receive, self._generation):
            try:
                deltas = await self._generation.next(self._keep_alive_s)
            except BatonError as error:
                await response_to(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                await self._stream(deltas, send)
                tail = self._end() + _DONE
            except BatonError as error:
                tail = _event(body_of(error))
            await send({"type": "http.response.body", "body": tail})

    async def _stream(self, deltas: list[Delta], send: Send) -> None:
        while True:
            done = self._generation.done
            body = b"".join(map(self._chunk, deltas)) if deltas or done else _KEEP_ALIVE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if done:
                return
            deltas = await self._generation.next(self._keep_alive_s)

    def _chunk(self, delta: Delta) -> bytes:
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

    def _end(self) -> bytes:
        """The last chunk, and the chunk with the usage if it was asked for; the final one carries the timings."""
        chunks = [self._last] if self._last else []
        if self._include_usage:
            chunks.append(self._shape.usage_chunk(self._generation.usage))
        if chunks:
            chunks[-1].update(timings_of(self._generation.timings))
        return b"".join(map(_event, chunks))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def _closed_when_left(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Within the context, the generation is closed as soon as the client leaves; at its end, in any case."""
    watch = asyncio.create_task(_close_when_left(receive, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.close()


async def _close_when_left(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
