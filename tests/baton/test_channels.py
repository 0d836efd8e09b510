"""What the gRPC servers of baton do with connections on which nothing happens, and with too many of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.channels import SERVER_OPTIONS, node_server_options

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # empty
MAX_CONCURRENT_STREAMS = 3
"""Its number among the settings of HTTP/2."""
TIMES_MS = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")


@pytest.mark.parametrize("begun", [b"", PREFACE + SETTINGS], ids=["says nothing", "asks nothing"])
async def test_a_connection_without_a_call_is_closed(begun: bytes) -> None:
    options = dict(SERVER_OPTIONS)
    assert {name: 0 < options[name] <= 10_000 for name in TIMES_MS} == dict.fromkeys(TIMES_MS, True)
    options |= dict.fromkeys(TIMES_MS, 100)  # as if time went faster
    server = grpc.aio.server(options=list(options.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    async with asyncio.timeout(10):
        while await reader.read(4096):
            pass
    writer.close()
    await server.stop(None)


async def test_a_node_has_room_for_its_streams_whoever_connects() -> None:
    async def echo(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            await context.write(message)

    assert dict(node_server_options(10**6))["grpc.max_allowed_incoming_connections"] == 4_096
    server = grpc.aio.server(options=node_server_options(8))
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("any", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        untyped: Any = channel
        call = untyped.stream_stream("/any/Stream")()
        await call.write(b"first")
        assert await call.read() == b"first"
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        settings = [await reader.readexactly(len(SETTINGS)) for reader, _ in strangers]
        with contextlib.suppress(ConnectionError):
            reader, beyond = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read(1) == b""
            beyond.close()
        await call.write(b"second")
        assert await call.read() == b"second"
        for _, writer in strangers:
            writer.close()
    assert {frame[3] for frame in settings} == {4}  # they were let in
    await server.stop(None)


async def test_a_connection_to_a_node_has_few_streams() -> None:
    server = grpc.aio.server(options=node_server_options(1024))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + SETTINGS)
    async with asyncio.timeout(20):
        head = await reader.readexactly(9)
        told = await reader.readexactly(int.from_bytes(head[:3]))
    pairs = [(int.from_bytes(told[i : i + 2]), int.from_bytes(told[i + 2 : i + 6])) for i in range(0, len(told), 6)]
    assert dict(pairs)[MAX_CONCURRENT_STREAMS] == 128
    writer.close()
    await server.stop(None)
