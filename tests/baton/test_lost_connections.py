"""What is said of a call whose connection was lost: gRPC has its own words for it, which change with what it did."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.streams import PeerStatus, connection_lost, rpc_reason

LOST = "the connection was lost"


def failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")


@pytest.mark.parametrize(
    ("code", "details", "says"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", LOST),  # a write that failed
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)", f"{LOST} (Socket closed)"),
        (grpc.StatusCode.ABORTED, "another session", None),
        (grpc.StatusCode.UNKNOWN, "", None),
    ],
)
def test_a_lost_connection_is_told_in_plain_words(code, details, says):
    error = failed(code, details)
    assert connection_lost(error) == says
    assert rpc_reason(error) == (says or f"{code.name}: {details}")


async def test_a_connection_that_breaks_is_seen_to_be_lost():
    """With gRPC's words as they are in the version that is installed."""

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # HTTP/2's SETTINGS, empty
        while b"/any/Stream" not in await reader.read(4096):
            pass
        writer.transport.abort()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        untyped: Any = channel
        call = untyped.stream_stream("/any/Stream")()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert (connection_lost(error.value) or "").startswith(LOST), error.value
    server.close()
    await server.wait_closed()


async def test_what_the_peer_said_is_not_lost_with_a_write_that_meets_the_end():
    class Service(grpc.GenericRpcHandler):
        def service(self, _: Any) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(self.end)

        async def end(self, _: Any, context: grpc.aio.ServicerContext) -> None:
            await context.read()
            await context.abort(grpc.StatusCode.ABORTED, "the peer does not read")

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        untyped: Any = channel
        call = untyped.stream_stream("/any/Stream")()
        status = PeerStatus(call)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # gRPC's own words of a late write
            while True:
                await call.write(bytes(20_000))
    assert status.error is not None
    assert rpc_reason(status.error) == "ABORTED: the peer does not read"
    await server.stop(0)
