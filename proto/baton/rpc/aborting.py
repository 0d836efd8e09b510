"""Ends a call with a status, from within its handler on a server."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    details: str,
    trailing_metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """Raises CancelledError, which the handler lets pass.

    `context.abort` raises an error of its own, which gRPC keeps with the call. Its traceback would have the frames of
    the handler, and so the call: a cycle, with a request of up to megabytes in it, until garbage is collected.
    """
    try:
        await context.abort(code, details, trailing_metadata)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
    raise asyncio.CancelledError
