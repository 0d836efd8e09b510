"""What every gRPC server of baton does with connections on which nothing happens."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.rpc.channels import SERVER_OPTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # empty
TIMES_MS = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")


@pytest.mark.parametrize("begun", [b"", PREFACE + SETTINGS], ids=["says nothing", "asks nothing"])
async def test_a_connection_without_a_call_is_closed(begun: bytes) -> None:
    options = dict(SERVER_OPTIONS)
    assert {name: 0 < options[name] <= 75_000 for name in TIMES_MS} == dict.fromkeys(TIMES_MS, True)
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
