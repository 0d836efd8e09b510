"""Answers requests that cannot be parsed with INVALID_ARGUMENT, in calls with a single request; gRPC would use UNKNOWN.

Streams parse their messages themselves and handle this there.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs alone
    """For `grpc.aio.server(interceptors=...)`."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        wrap = _wrap_stream if inspect.isasyncgenfunction(handler.unary_stream) else _wrap_call
        method = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = wrap(getattr(handler, method), handler.request_deserializer)
        make: Any = getattr(grpc, f"{method}_rpc_method_handler")
        return make(behaviour, request_deserializer=None, response_serializer=handler.response_serializer)


def _wrap_call(serve: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    async def call(data: bytes, context: Any) -> Any:
        return await serve(await _parsed(data, context, parse), context)

    return call


def _wrap_stream(serve: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    async def stream(data: bytes, context: Any) -> AsyncIterator[Any]:
        async for answer in serve(await _parsed(data, context, parse), context):
            yield answer

    return stream


async def _parsed(data: bytes, context: Any, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed message: its bytes are no message")
