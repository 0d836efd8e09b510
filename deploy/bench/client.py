"""One streamed request to a server with OpenAI's API, with the time of each event.

asyncio's streams and httptools, which the router needs anyway: a general-purpose client spends 1 to 2 ms on a request,
and more on each event of 1,000 streams than the event is worth.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

READ_BYTES = 64 * 1024


class RequestFailed(Exception):
    """A request without a whole answer. `kind` is what it is counted under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """Times are `time.perf_counter`'s, since those of uvloop are whole milliseconds. `arrivals`: of each event that had
    text. `cached_tokens`: those of the prompt that the server found in a prefix cache, if it says so."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `url` may end in /v1 or a path before it."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    def path(self, name: str) -> str:
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base}/{name}" if base.endswith("/v1") else f"{base}/v1/{name}"


class Client:
    """Keeps connections open for later requests. Close it at the end."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._target = target
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._netloc = parts.netloc
        self._idle: list[_Connection] = []

    async def stream(self, name: str, body: Mapping[str, Any], timeout_s: float) -> Answer:
        """POST `body` and read the events to the end. Raises RequestFailed."""
        answer = Answer(time.perf_counter())
        reader = _Events(answer)
        await self._exchange("POST", name, json.dumps(body).encode(), timeout_s, reader.take)
        reader.finish()
        return answer

    async def get(self, name: str, timeout_s: float) -> Any:
        """The JSON of a GET. Raises RequestFailed."""
        content = bytearray()
        await self._exchange("GET", name, b"", timeout_s, content.extend)
        try:
            return json.loads(content)
        except ValueError as error:
            raise RequestFailed("bad_answer", f"{name}: {error}") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(
        self, method: str, name: str, content: bytes, timeout_s: float, take: Callable[[bytes], None]
    ) -> None:
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                await connection.exchange(self._head(method, name, len(content)) + content, take)
        except TimeoutError:
            raise RequestFailed("timeout", f"no whole answer within {timeout_s:g} s") from None
        finally:
            if connection is not None and connection.reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
            connection.close()
        try:
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))
        except OSError as error:
            raise RequestFailed("connect", str(error)) from None

    def _head(self, method: str, name: str, length: int) -> bytes:
        fields = [("host", self._netloc), ("content-type", "application/json"), ("content-length", str(length))]
        lines = [f"{method} {self._target.path(name)} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (*fields, *self._target.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class _Connection:
    """One exchange at a time; `reusable` after a whole answer that does not close it. Also httptools' callbacks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.reusable = False

    @property
    def alive(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def exchange(self, request: bytes, take: Callable[[bytes], None]) -> None:
        """Send the request and hand the body of a 200 to `take` as it arrives. Raises RequestFailed."""
        self.reusable, self._complete, self._take = False, False, take
        self._refusal = bytearray()
        self._parser = httptools.HttpResponseParser(self)
        self._length_known = self._keep_alive = False
        try:
            self._writer.write(request)
            await self._read()
        except OSError as error:
            raise RequestFailed("disconnected", str(error)) from None
        except httptools.HttpParserError as error:
            raise RequestFailed("bad_answer", str(error)) from error.__context__
        if (status := self._parser.get_status_code()) != 200:
            raise RequestFailed(f"http_{status}", self._refusal[:500].decode(errors="replace"))
        self.reusable = self._keep_alive

    async def _read(self) -> None:
        while not self._complete:
            data = await self._reader.read(READ_BYTES)
            if not data:
                if self._length_known or not self._parser.get_status_code():
                    raise RequestFailed("disconnected", "the server closed the connection before the end")
                return  # a body that ends with its connection
            self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._length_known |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._take(body)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep_alive = self._length_known and self._parser.should_keep_alive()  # known only within this call


class _Events:
    """Server-sent events from pieces of a body, cut anywhere."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self.failure: RequestFailed | None = None

    def take(self, piece: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and self.failure is None:
                self._event(line[5:].strip(), now)

    def finish(self) -> None:
        """Raises RequestFailed if the answer was not whole."""
        if self.failure:
            raise self.failure
        if not self._answer.done:
            raise RequestFailed("disconnected", "the stream ended without [DONE] or a finish_reason")
        if not self._answer.arrivals:
            raise RequestFailed("no_output", "the answer has no text")
        self._answer.output_tokens = self._answer.output_tokens or len(self._answer.arrivals)

    def _event(self, data: bytes, now: float) -> None:
        answer = self._answer
        answer.ended = now
        if data == b"[DONE]":
            answer.done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self.failure = RequestFailed("stream_error", json.dumps(event["error"])[:500])
                return
            if usage := event.get("usage"):
                answer.input_tokens = usage.get("prompt_tokens") or 0
                answer.output_tokens = usage.get("completion_tokens") or 0
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            choices = event.get("choices") or ()
            answer.done |= any(choice.get("finish_reason") for choice in choices)  # all that some servers end with
            if any(_text(choice) for choice in choices):
                answer.arrivals.append(now)
        except (ValueError, AttributeError, TypeError) as error:
            self.failure = RequestFailed("bad_answer", f"event {data[:100]!r}: {error}")


def _text(choice: Mapping[str, Any]) -> Any:
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    return choice.get("text") or delta.get("content") or thought or delta.get("tool_calls")
