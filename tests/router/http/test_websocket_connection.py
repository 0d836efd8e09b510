"""What one WebSocket's connection may take of the HTTP server: however it ends, it is gone in time, read or not."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from router.http.limits import Bodies, ConnectionLimits, WebSockets
from router.http.server import HttpServer
from tests.router.http_wire import LOOPBACK, PATIENCE_S, Peer, on_uvloop, peer

pytest.importorskip("websockets", reason="the router needs it for WebSockets")

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
SHORT_S = 0.05
WRITE_S = 0.2
ROOM_BYTES = 2**20
CLOSE = b"\x88\x82\x00\x00\x00\x00\x03\xe8"
PING = b"\x89\xfd\x00\x00\x00\x00" + bytes(125)
INVALID = b"\xff" * 6

Serve = Callable[[WebSocket, "Opened"], Awaitable[None]]


class Opened:
    """A server with one client, which has opened a WebSocket."""

    def __init__(self, server: HttpServer, client: Peer, bodies: Bodies) -> None:
        self.server = server
        self.bodies = bodies
        self.client = client

    @property
    def connection(self) -> Any:
        (connection,) = self.server.server_state.connections
        return connection

    async def hears(self, data: bytes) -> None:
        """Read until it has come."""
        heard = bytearray()
        while data not in heard:
            piece = await self.client.read()
            assert piece, "it was hung up on"
            heard += piece

    async def gone(self) -> None:
        """Wait until the server has forgotten it: until then it takes one of --max-connections."""
        async with asyncio.timeout(PATIENCE_S):
            while self.server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(serve: Serve, write_timeout_s: float = PATIENCE_S, **config: object) -> AsyncIterator[Opened]:
    """serve: an accepted WebSocket. config: of uvicorn."""
    opening = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await serve(websocket, await opening)

    listener = socket.create_server((LOOPBACK, 0))
    bodies = Bodies(ROOM_BYTES, ROOM_BYTES)
    sockets = WebSockets(frozenset({"/"}), bodies)
    server = HttpServer(app, ConnectionLimits(write_timeout_s=write_timeout_s), websockets=sockets)
    for name, value in config.items():
        setattr(server.config, name, value)
    serving = asyncio.create_task(server.serve([listener]))
    await server.up.wait()
    try:
        async with peer(listener.getsockname()[1], receive_bytes=4096) as client:
            scene = Opened(server, client, bodies)
            await client.send(HANDSHAKE)
            await scene.hears(b"\r\n\r\n")
            opening.set_result(scene)
            async with asyncio.timeout(PATIENCE_S):
                yield scene
    finally:
        server.stop()
        await serving


# ---- time ----


async def fill(websocket: WebSocket, scene: Opened) -> None:
    """Send until a bit is left that the socket does not take, too little for its sender to be paused."""
    while not scene.connection.transport.get_write_buffer_size():
        await websocket.send_bytes(bytes(8192))
        await asyncio.sleep(0)
    assert scene.connection.writable.is_set()


@pytest.mark.parametrize("said", [CLOSE, INVALID, None], ids=["close", "invalid", "silence"])
@on_uvloop
async def test_what_the_client_has_not_read_keeps_no_websocket_that_ends(said):
    filled = asyncio.Event()

    async def serve(websocket, scene):
        await fill(websocket, scene)
        filled.set()
        await websocket.receive_text()

    pings = {} if said else {"ws_ping_interval": SHORT_S, "ws_ping_timeout": SHORT_S}
    async with opened(serve, WRITE_S, **pings) as scene:
        await filled.wait()
        if said:
            await scene.client.send(said)
        await scene.gone()


@on_uvloop
async def test_nor_one_that_the_application_leaves():
    async with opened(fill, WRITE_S) as scene:
        await scene.gone()


@on_uvloop
async def test_nor_one_that_was_closed_and_is_sent_pings():
    closed = asyncio.Event()

    async def serve(websocket, scene):
        await websocket.close()
        closed.set()

    async with opened(serve, WRITE_S) as scene:
        await closed.wait()
        connection = scene.connection
        while not connection.transport.get_write_buffer_size():
            await scene.client.send(PING * 64)
            await asyncio.sleep(0)
        connection.transport.close()  # as uvicorn after 10 s
        await scene.gone()


# ---- memory ----


async def tell_length(websocket, scene):
    """Of a text."""
    await websocket.send_text(str(len(await websocket.receive_text())))
    await websocket.receive_text()


@on_uvloop
async def test_what_has_been_taken_takes_no_room_of_bodies_though_the_next_frame_has_begun():
    async with opened(tell_length) as scene:
        answer = asyncio.create_task(scene.hears(b"\x81\x012"))
        pings = PING * 500
        await scene.client.send(pings[:60])
        for _ in range(3 * ROOM_BYTES // len(pings)):
            await scene.client.send(pings[60:] + pings[:60])
        await scene.client.send(pings[60:] + b"\x81\x82\x00\x00\x00\x00ab")
        await answer
        assert scene.bodies._held_bytes == 0


@on_uvloop
async def test_a_message_in_many_frames_is_kept_as_one_piece():
    async with opened(tell_length) as scene:
        frames = b"\x01\x82\x00\x00\x00\x00ab" + b"\x00\x82\x00\x00\x00\x00cd" * 5000
        await scene.client.send(frames + PING)
        await scene.hears(b"\x8a\x7d" + bytes(125))
        assert len(scene.connection.frames) <= 2
        assert 10_000 < scene.bodies._held_bytes < 10_100
        await scene.client.send(b"\x80\x80\x00\x00\x00\x00")
        await scene.hears(b"\x81\x0510002")
