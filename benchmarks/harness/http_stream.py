"""Streamed completions over HTTP/1.1, with the time of each event.

Written by hand on asyncio's streams: a general-purpose client spends 1 to 2 ms on each request, as much as what is to
be measured here. Supports only what the router sends: chunked bodies, and plain ones for errors.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.address import HostPort

TIMEOUT_S = 600.0
LIMIT_BYTES = 16 * 1024 * 1024


class RequestFailed(Exception):
    """The answer was an error; the text is its body."""


@dataclass(slots=True)
class Streamed:
    """One answer. Times are in seconds of `time.perf_counter`; `arrivals[i]`: when token i arrived. `due`: when to send
    it; None: at any time."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)
    due: float | None = None

    @property
    def late_s(self) -> float:
        """How much later it was sent than it was due: no latency has this in it."""
        return 0.0 if self.due is None else self.sent - self.due

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def between_tokens_s(self) -> list[float]:
        """Tokens of one event are 0 s apart."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def first_gap_s(self) -> float:
        """From the first token to the second. NaN for a single token."""
        return self.arrivals[1] - self.arrivals[0] if len(self.arrivals) > 1 else float("nan")

    def phase_s(self, name: str) -> float:
        """One of the durations in the answer's `timings`."""
        return float(self.timings.get(f"{name}_ms", 0.0)) / 1e3

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens; 0 for a single token."""
        return max(self.between_tokens_s, default=0.0)

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first. NaN for a single token."""
        count = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / count if count else float("nan")

    @property
    def total_s(self) -> float:
        return self.arrivals[-1] - self.sent


class Connection:
    """One keep-alive connection, for one request at a time. Use with `async with`."""

    def __init__(self, address: HostPort) -> None:
        self._address = address

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(
            self._address.host, self._address.port, limit=LIMIT_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def stream(self, path: str, body: Mapping[str, Any], answer: Streamed | None = None) -> Streamed:
        """POST `body` and read the events to the end, into `answer` if given. Raises RequestFailed."""
        async with asyncio.timeout(TIMEOUT_S):
            request = self._request(
                "POST", path, json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
            )
            answer = answer or Streamed(0.0)
            answer.sent = time.perf_counter()
            self._writer.write(request)
            headers = await self._head()
            if headers.get("transfer-encoding") != "chunked":
                raise RequestFailed((await self._plain(headers)).decode(errors="replace"))
            async for chunk in self._chunks():
                _take(answer, chunk, time.perf_counter())
        return answer

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST of `body`; the answer's JSON. Raises RequestFailed."""
        return json.loads(await self.page(path, body))

    async def page(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """GET, or POST of `body`; the answer as it is. Raises RequestFailed."""
        async with asyncio.timeout(TIMEOUT_S):
            content = b"" if body is None else json.dumps(body).encode()
            self._writer.write(self._request("GET" if body is None else "POST", path, content))
            headers = await self._head()
            answer = await self._plain(headers)
        if headers[":status"] != "200":
            raise RequestFailed(answer.decode(errors="replace"))
        return answer

    def _request(self, method: str, path: str, content: bytes) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def _head(self) -> dict[str, str]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        return {":status": head[0].split(" ")[1], **headers}

    async def _plain(self, headers: Mapping[str, str]) -> bytes:
        return await self._reader.readexactly(int(headers["content-length"]))

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")


def _take(answer: Streamed, chunk: bytes, now: float) -> None:
    """Add the events of one chunk to the answer: the router never splits an event."""
    for line in chunk.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RequestFailed(json.dumps(event))
        answer.usage = event.get("usage") or answer.usage
        answer.timings = event.get("timings") or answer.timings
        for choice in event["choices"]:
            answer.tokens += choice["token_ids"]
            answer.arrivals += [now] * len(choice["token_ids"])
            answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
                best = sorted(top.values(), reverse=True)
                answer.margins.append(best[0] - best[1] if len(best) > 1 else 0.0)
