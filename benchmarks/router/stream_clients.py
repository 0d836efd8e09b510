"""Many HTTP clients with streamed answers, as cheap as Python can be: bytes are collected, and read at an answer's end.

Other clients parse each event when it comes (`benchmarks.harness.http_stream`); a thousand of those would take more of
the machine than the router that is to be measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any

from baton.address import HostPort

TIMEOUT_S = 300.0
_TEXT = re.compile(rb'"(?:content|text)":"((?:[^"\\]|\\.)*)"')
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class WrongAnswer(Exception):
    """An answer that is not what the nodes have sent."""


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`."""

    sent: float
    first: float
    data: bytes

    @property
    def first_token_s(self) -> float:
        return self.first - self.sent

    @property
    def text(self) -> str:
        pieces = b"".join(_TEXT.findall(self.data))
        return str(json.loads(b'"' + pieces + b'"'))

    @property
    def num_chunks(self) -> int:
        return self.data.count(b"data: {")

    def check(self, expected: str) -> None:
        """Raises WrongAnswer."""
        if not self.data.endswith(_END) or b'"finish_reason":"length"' not in self.data[-2048:]:
            raise WrongAnswer(f"incomplete: {self.data[:300]!r} ... {self.data[-300:]!r}")
        if self.text != expected:
            raise WrongAnswer(f"{len(self.text)} characters, not {len(expected)}: {self.text[:200]!r}")


class Client(asyncio.Protocol):
    """One keep-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._sent = self._first = 0.0
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Answer] = loop.create_future()

    @classmethod
    async def connect(cls, address: HostPort) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, address.host, address.port)
        return client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP
        self._transport = transport

    def send(self, request: bytes) -> None:
        """`begun` and `answer` are those of this request from here on."""
        loop = asyncio.get_running_loop()
        self._parts, self._first = [], 0.0
        self.begun, self._ended = loop.create_future(), loop.create_future()
        self._sent = time.perf_counter()
        self._transport.write(request)

    async def answer(self) -> Answer:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._ended

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._first:
            self._first = time.perf_counter()
            self.begun.set_result(None)
            if not data.startswith(b"HTTP/1.1 200"):
                self._ended.set_exception(WrongAnswer(data[:500].decode(errors="replace")))
        if data[-4:] == b"\r\n\r\n" or len(data) < 16:
            self._look_for_end()

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.begun, self._ended):
            if not future.done():
                future.set_exception(exc or WrongAnswer(f"cut off after {b''.join(self._parts)[-300:]!r}"))
                future.exception()  # it may be that nobody waits

    def _look_for_end(self) -> None:
        data = b"".join(self._parts)
        if data.endswith(b"0\r\n\r\n") and not self._ended.done():
            self._ended.set_result(Answer(self._sent, self._first, data))


def chat_request(prompt: str, max_tokens: int, salt: str | None, **fields: Any) -> bytes:
    """A whole HTTP request for a streamed chat."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
        **fields,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content
