"""The common part of all long-lived streams: a bounded outbox, detection of silence, and an end with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.rpc.silence import until_silent

M = TypeVar("M")
T = TypeVar("T")

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined] # known to grpc, not to its type stubs
HEARTBEAT_S = 0.5
"""A side with nothing to say says so this often. See `ClusterSettings.silence_timeout`."""
HELLO_S = 5.0
"""Timeout for the first message of a new stream."""
ENDED = "the peer ended the stream"
LEFT = "the peer ended the call, or its connection was lost"
"""Why gRPC cancels a server's handler of a stream, unless the server itself ends."""
STOPPED = "the node was stopped"
_NO_MESSAGE = "its bytes are no message"
_LOST_CONNECTION = ("Internal error from Core", "Stream removed")
"""What gRPC's details begin with when a call's connection was lost."""
_WRITE_FAILED = _LOST_CONNECTION[0]


class Stream(Generic[M]):
    """Our side of one stream: the messages waiting to be written, and the reason why it must end. Asyncio thread only.

    A peer that reads slowly gets ever larger batches; one that lets more than `limit` messages accumulate is considered
    not to read at all, and the stream ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[M] = []
        self._filled = asyncio.Event()
        self.closing: str | None = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def put(self, *messages: M) -> None:
        """Queue messages, unless the stream has ended."""
        if len(self._waiting) + len(messages) > self._limit:
            self.end("the peer does not read")
        if not self._end.done():
            self._waiting += messages
            self._filled.set()

    def wake(self) -> None:
        """Have the writer's `take` return now, even without messages."""
        self._filled.set()

    async def take(self, timeout_s: float) -> list[M]:
        """All waiting messages, in order; an empty list after `timeout_s` without any, or when the stream closes."""
        if not self._waiting and self.closing is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return []
        self._filled.clear()
        taken, self._waiting = self._waiting, []
        return taken

    def end(self, reason: str) -> None:
        """End the stream; the first reason counts."""
        if not self._end.done():
            self._end.set_result(reason)

    def close(self, reason: str) -> None:
        """End the stream for `reason` once its writer, which checks `closing`, finds no message waiting."""
        self.closing = self.closing or reason
        self._filled.set()

    async def until_end(self) -> str:
        return await asyncio.shield(self._end)


async def read_all(
    read: Callable[[], Awaitable[Any]],
    handle: Callable[[Any], None],
    silence_s: float | None,
    first_s: float = 0.0,
) -> str:
    """Pass each message to `handle` until the stream ends; returns the reason.

    The stream also ends after `silence_s` without a message, by a clock that runs only while we listen (before the
    first one after `first_s`, if that is longer); on bytes that cannot be parsed; and on a message for which `handle`
    raises InvalidRequest.
    """
    if silence_s is None:
        return await _read_all(read, handle)
    try:
        async with until_silent(max(silence_s, first_s)) as silence:

            async def read_and_note() -> Any:
                message = await read()
                silence.limit(silence_s)
                silence.heard()
                return message

            return await _read_all(read_and_note, handle)
    except TimeoutError:
        return f"silent for {silence_s:g} s"


async def _read_all(read: Callable[[], Awaitable[Any]], handle: Callable[[Any], None]) -> str:
    try:
        while (message := await read()) is not EOF:
            handle(require_message(message))
    except DecodeError:
        return f"malformed message: {_NO_MESSAGE}"
    except InvalidRequest as error:
        return f"malformed message: {error.message}"
    return ENDED


def require_message(read: M | None) -> M:
    """What a stream has read. Raises InvalidRequest for bytes that are no message: a caller's stream reads None then,
    where a server's raises DecodeError."""
    if read is None:
        raise InvalidRequest(_NO_MESSAGE)
    return read


async def first_end(*sides: Coroutine[Any, Any, str]) -> str:
    """Run the sides of a stream until the first ends, cancel the others, and return its reason."""
    tasks = [asyncio.create_task(side) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return _reason(next(task for task in tasks if task in done))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reason(side: asyncio.Task[str]) -> str:
    """Why the side ended. An error that gRPC raises for a lost stream is a reason; any other is our bug, and raised."""
    try:
        return side.result()
    except grpc.aio.AioRpcError as error:
        return rpc_reason(error)
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        return f"the stream broke: {error}"


class PeerStatus:
    """With which error a peer has ended a call of ours. It is kept as it comes, since a write that meets the end has
    gRPC put its own words, of a failed write, in the place of the peer's. None: the peer has not ended it, or not with
    an error; we have cancelled it; or all that gRPC knows is that a write has failed."""

    def __init__(self, call: Any) -> None:
        self.error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._done)

    def _done(self, call: Any) -> None:
        code, details = _result(call.code()), _result(call.details())
        if code not in (None, grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) and details != _WRITE_FAILED:
            self.error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def _result(awaitable: Coroutine[Any, Any, T]) -> T | None:
    """Its result, without waiting for it; None: it is not there yet."""
    try:
        awaitable.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    awaitable.close()
    return None


def rpc_reason(error: grpc.aio.AioRpcError) -> str:
    return connection_lost(error) or f"{error.code().name}: {error.details()}"


def connection_lost(error: grpc.aio.AioRpcError) -> str | None:
    """That the connection was lost, and how if gRPC says it; None: the call failed otherwise. gRPC has several words
    for it, by what it did just then; some sound like a defect of its own."""
    details = error.details() or ""
    words = next(filter(details.startswith, _LOST_CONNECTION), None)
    return None if words is None else f"the connection was lost{details.removeprefix(words)}"
