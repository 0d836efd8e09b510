"""An HTTP server with an application of the test's own, and clients that say what they like to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.limits import ConnectionLimits
from router.http.server import HttpServer

PATIENCE_S = 20.0
LOOPBACK = "127.0.0.1"
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
HEADER = b"x-filler: " + b"a" * 1000 + b"\r\n"
"""`echoing` takes three of them."""


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """On the router's own loop: other transports close in other ways."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        uvloop.run(test(**arguments))

    return run


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the size of the body."""
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    else:
        return
    body = f"{scope['path']} {size}".encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has read the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, tls: object = None, websockets: Any = None, **limits: object) -> AsyncIterator[int]:
    """Serves `app`; gives the port. What still runs at the end is ended."""
    listener = socket.create_server((LOOPBACK, 0))
    server = HttpServer(app, ConnectionLimits(**limits), tls, websockets=websockets)  # type: ignore[arg-type]
    task = asyncio.create_task(server.serve([listener]))
    await server.up.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.stop()
        await task


def echoing() -> contextlib.AbstractAsyncContextManager[int]:
    """`serving` with small limits."""
    return serving(echo, max_header_bytes=4096, linger_s=0.3)


class Peer:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE_S):
            self._writer.write(data)
            await self._writer.drain()

    async def flood(self, piece: bytes, num_bytes: int) -> int:
        """Send it again and again; returns how much before the other side cut it off."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < num_bytes:
                await self.send(piece)
                sent += len(piece)
        return sent

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
            return int(head[0].split()[1]), headers, body

    async def refusal(self) -> tuple[int, str]:
        """Status and message, in OpenAI's form; nothing comes after it."""
        status, headers, body = await self.answer()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["connection"] == "close"
        await self.gone()
        return status, error["message"]

    async def read(self) -> bytes:
        """Some of what comes next."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read(2**16)

    async def rest(self) -> bytes:
        """All that comes until the other side ends it."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read()

    async def gone(self) -> None:
        """Wait for the other side to end it; nothing more may come."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):
                assert await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def peer(port: int, receive_bytes: int | None = None) -> AsyncIterator[Peer]:
    """`receive_bytes`: of its socket's buffer, for one that soon takes no more."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (LOOPBACK, port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
