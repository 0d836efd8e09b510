"""WebSocket messages and frames that no client would send: each is answered, or its socket closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from random import Random
from typing import Any

import httpx
import pytest

from tests.fuzz.mutations import wrong_bytes, wrong_json
from tests.fuzz.served import (
    CASE_S,
    CHAT_BODY,
    RESPONSE_BODY,
    SHARES,
    answers_as_ever,
    no_mistakes,
    serving,
    some_at_once,
)

websockets = pytest.importorskip("websockets", reason="the router needs it to serve them")

BODIES: dict[str, Any] = {
    "/v1/responses": {**RESPONSE_BODY, "type": "response.create", "stream": True},
    "/ws/chat": {**CHAT_BODY, "stream": True},
}
NUM_MESSAGES = 150
NUM_RAW = 250
ANSWER_S = 0.05
"""For an answer to begin. What is no whole frame gets none."""
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
HANDSHAKE = (
    b"GET /ws/chat HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9


def frame(opcode: int, payload: bytes, fin: bool = True) -> bytes:
    """Masked with zeros."""
    size = len(payload).to_bytes(1) if len(payload) < 126 else b"\x7e" + len(payload).to_bytes(2)
    return bytes([fin << 7 | opcode, size[0] | 0x80]) + size[1:] + bytes(4) + payload


FRAMES = (
    frame(TEXT, b'{"messages": []}'),
    frame(BINARY, b'{"messages": []}'),
    frame(TEXT, b'{"messages"', fin=False) + frame(PING, b"x") + frame(0, b": []}"),
    frame(TEXT, b'{"messages": [{"role": "user", "content": "hi"}]}') + frame(CLOSE, b"\x03\xe8"),
    frame(TEXT, b"\xff\xfe"),
    frame(TEXT, b"x" * 300),
)


@SHARES
@pytest.mark.parametrize("path", BODIES)
async def test_messages(share: int, path: str, caplog: pytest.LogCaptureFixture) -> None:
    ends = Counter[str]()
    async with serving() as router, httpx.AsyncClient(base_url=router.http, timeout=CASE_S) as client:
        url = f"ws://{router.server.http_address}{path}"

        async def one(number: int) -> None:
            message = wrong_json(Random(f"{path} {number}"), BODIES[path])
            async with asyncio.timeout(CASE_S), websockets.connect(url) as websocket:
                await websocket.send(message)
                while not (end := _end(await websocket.recv())):
                    pass
                ends[end] += 1

        await some_at_once(one, NUM_MESSAGES // share)
        await answers_as_ever(client)
        await router.idle()
    assert ends["error"] > 50 / share
    no_mistakes(caplog)


def _end(message: str) -> str:
    """What kind of end this message is, if it is one."""
    if message == "[DONE]":
        return message
    content = json.loads(message)
    assert '"internal"' not in message, message
    if "error" in content and "object" not in content:
        return "error"
    return content["type"] if content.get("type") in ENDS else ""


@SHARES
async def test_frames(share: int, caplog: pytest.LogCaptureFixture) -> None:
    closed = Counter[bool]()
    async with serving() as router, httpx.AsyncClient(base_url=router.http, timeout=CASE_S) as client:
        address = router.server.http_address

        async def one(number: int) -> None:
            random = Random(f"frames {number}")
            sent = wrong_bytes(random, random.choice(FRAMES))
            async with asyncio.timeout(CASE_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(HANDSHAKE)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101")
                writer.write(sent)
                closed[await _is_closed(reader)] += 1
                writer.transport.abort()

        await some_at_once(one, NUM_RAW // share)
        await answers_as_ever(client)
        await router.idle()
    assert min(closed.values()) > 10
    no_mistakes(caplog)


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(ANSWER_S):
            await reader.read()
    return reader.at_eof()
