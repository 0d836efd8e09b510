"""A call that is ended with a status is gone with all that its handler had."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.aborting import abort


class Request:
    """What a handler has."""


async def test_a_call_that_is_aborted_is_no_garbage() -> None:
    kept: list[weakref.ref[Request]] = []

    async def refuse(_: bytes, context: Any) -> None:
        request = Request()
        kept.append(weakref.ref(request))
        await abort(context, grpc.StatusCode.NOT_FOUND, "no")

    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    handler = grpc.unary_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Refuse": handler}),))
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_stream("/test/Refuse", None, None)(b"").read()
        await server.stop(10)
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no")
        assert [request() for request in kept] == [None]
    finally:
        gc.enable()
