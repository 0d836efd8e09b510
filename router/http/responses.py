"""Sends a generation, whole or as server-sent events. If the client leaves, the generation is cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from baton.messages import TokenLogprobs
from router.generation import Generation
from router.http.answers import json_response
from router.http.body_writer import BodyWriter, body_writer_of
from router.http.errors import body_of, response_to
from router.http.event_stream import EventShape, EventStream
from router.offload.threads import Offload
from router.text.answer import Delta

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LOGPROBS_SIZE, _LOGPROB_SIZE = 50, 2.5
"""The cost of writing a token's logprobs, relative to a token: at least, and of each where there are many."""
_PROMPT_LOGPROB_SIZE = 5
"""The cost of writing one logprob of a prompt."""
_PIECE_SIZE = 5
"""The cost of reading one piece of an answer's text."""


Whole = dict[str, Any] | list[dict[str, Any]]


class WholeShape(Protocol):
    """One request's whole answer in JSON, from the deltas of each answer. `reads_pieces`: parsers read the deltas one
    by one, which takes longer than reading them joined."""

    @property
    def reads_pieces(self) -> bool: ...

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> Whole: ...


class WholeResponse(Response):
    """All answers at once."""

    background = None

    def __init__(self, generation: Generation, shape: WholeShape, offload: Offload) -> None:
        """(Response's own makes a body and a head, which are not what is sent.)"""
        self._generation = generation
        self._shape = shape
        self._offload = offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_writer_of(scope).on_left(self._generation.close)
        try:
            response = await self._answer(await self._collect())
        except BatonError as error:
            response = response_to(error, scope)
        finally:
            self._generation.close()
        await response(scope, receive, send)

    async def _collect(self) -> dict[int, list[Delta]]:
        deltas: dict[int, list[Delta]] = {}
        while not self._generation.done:
            for delta in await self._generation.next():
                deltas.setdefault(delta.index, []).append(delta)
        return deltas

    async def _answer(self, deltas: dict[int, list[Delta]]) -> Response:
        every = [delta for of_answer in deltas.values() for delta in of_answer]
        size = sum(len(delta.token_ids) + sum(map(_size_of, delta.logprobs)) for delta in every)
        size += sum(_PROMPT_LOGPROB_SIZE * delta.prompt.size for delta in every if delta.prompt)
        size += self._generation.usage.num_prompt_tokens
        if self._shape.reads_pieces:
            size += _PIECE_SIZE * len(every)
        answers = [deltas[index] for index in sorted(deltas)]
        return await json_response(lambda: self._shape.whole(self._generation, answers), size, self._offload)


class EventResponse(Response):
    """The events of `shape`.

    The response begins with the first delta, so that an earlier error has its HTTP status. While the request is queued
    it begins after `keep_alive_s`, and sends a sign of life that often. A later error is an event, the last one.
    """

    background = None

    def __init__(self, generation: Generation, shape: EventShape, keep_alive_s: float) -> None:
        """(See WholeResponse.)"""
        self._generation = generation
        self._shape = shape
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = body_writer_of(scope)
        writer.on_left(self._generation.close)
        try:
            await self._send(writer, scope, receive, send)
        finally:
            self._generation.close()

    async def _send(self, writer: BodyWriter, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            deltas = await self._generation.next(self._keep_alive_s)
        except BatonError as error:
            await response_to(error, scope)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        stream = EventStream(self._generation, self._shape, writer)
        try:
            await stream.run(deltas, self._keep_alive_s)
            tail = self._shape.end()
        except BatonError as error:
            tail = self._shape.error(body_of(error, scope))
        await send({"type": "http.response.body", "body": stream.rest + tail})


def _size_of(entry: TokenLogprobs) -> int:
    return max(_LOGPROBS_SIZE, int(_LOGPROB_SIZE * len(entry.top)))
