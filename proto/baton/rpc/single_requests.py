"""Receives and parses the request of calls that have a single one.

gRPC would wait for it as long as the client likes, also while the server stops, and would answer one that cannot be
parsed with UNKNOWN. Streams of requests parse their messages themselves and handle all this there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.rpc.aborting import abort


class SingleRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs alone
    """For `grpc.aio.server(interceptors=...)`. `timeout_s`: from a call's begin until its request has come."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waits: set[asyncio.Timeout] = set()
        self._stopping = False

    def stop(self, grace_s: float) -> None:
        """The server takes no more calls: those that wait for their request end after `grace_s`."""
        self._stopping = True
        latest = asyncio.get_running_loop().time() + grace_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(min(latest, wait.when() or latest))

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        serve = handler.unary_stream or handler.unary_unary
        wrap = self._wrap_stream if inspect.isasyncgenfunction(serve) else self._wrap_call
        # only a handler for a stream of requests runs before a message has come
        make: Any = getattr(grpc, f"stream_{'stream' if handler.response_streaming else 'unary'}_rpc_method_handler")
        return make(wrap(serve, handler.request_deserializer), response_serializer=handler.response_serializer)

    def _wrap_call(self, serve: Callable[..., Any], parse: Callable[[bytes], Any] | None) -> Callable[..., Any]:
        async def call(_: object, context: Any) -> Any:
            return await serve(await self._received(context, parse), context)

        return call

    def _wrap_stream(self, serve: Callable[..., Any], parse: Callable[[bytes], Any] | None) -> Callable[..., Any]:
        async def stream(_: object, context: Any) -> AsyncIterator[Any]:
            async for answer in serve(await self._received(context, parse), context):
                yield answer

        return stream

    async def _received(self, context: Any, parse: Callable[[bytes], Any] | None) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as wait:
                self._waits.add(wait)
                try:
                    data = await context.read()
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            await self._abort_late(context)
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        try:
            return parse(data) if parse else data
        except DecodeError:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "malformed message: its bytes are no message")

    async def _abort_late(self, context: Any) -> NoReturn:
        if self._stopping:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        late = f"the request did not come within {self._timeout_s:g} s"
        await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, late)
