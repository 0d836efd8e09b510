"""A node's monitoring pages: `/metrics`, checks such as `/health` that give a reason, admin pages and admin actions.

Whatever clients send costs a bounded number of connections, bytes and seconds, and little interpreter time, which the
engine's thread needs: each client address is answered at most RATE times a second after a burst, and otherwise waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType

import uvloop
from prometheus_client import CollectorRegistry

from baton.address import HostPort
from baton.errors import BatonError
from baton.process.listening import listen_socket
from baton.telemetry.admin import AdminGate
from baton.telemetry.exposition import metrics_page
from baton.telemetry.pace import Pace

log = logging.getLogger(__name__)

Check = Callable[[], str | None]
Page = Callable[[], Awaitable[tuple[HTTPStatus, str]]]
Action = Callable[[bytes], Awaitable[tuple[HTTPStatus, str]]]
"""Takes the body of a POST."""

MAX_CONNECTIONS = 64
"""A further connection closes the oldest."""
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 4 * 1024
RATE = 10.0
BURST = 20
PATIENCE_S = 5.0
"""A client that would have to wait longer is refused."""
HEAD_S = 5.0
"""Timeout for a client to send its request."""
ANSWER_S = 90.0
WRITE_S = 20.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", f"Content-Type: {self.kind}"]
        lines += [f"Content-Length: {len(self.body)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _text(status: HTTPStatus, text: str, **headers: str) -> _Answer:
    return _Answer(status, (text + "\n").encode(), headers=headers)


class MetricsServer:
    """Serves on its own thread from construction to `close`.

    `checks`, by path: functions that return None for a 200, or the text of a 503. They run on the server's thread and
    must not block. `pages`, by path: functions that return status and text (JSON if it begins with a brace), or raise a
    BatonError, which becomes the answer. `actions`, by path: likewise, for POST. `gate` controls access to pages and
    actions. Raises OSError if `listen` is not available.
    """

    def __init__(
        self,
        listen: HostPort,
        registry: CollectorRegistry,
        checks: Mapping[str, Check],
        pages: Mapping[str, Page],
        gate: AdminGate,
        actions: Mapping[str, Action] = MappingProxyType({}),
    ) -> None:
        self._registry = registry
        self._checks = checks
        self._pages = pages
        self._actions = actions
        self._gate = gate
        self._pace = Pace(RATE, BURST)
        self._open: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self._listener = listen_socket(listen)
        self.address = HostPort(listen.host, self._listener.getsockname()[1])
        # not asyncio's own, which logs each connection that it has no descriptor for a hundred times a second
        self._aio = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._aio.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._aio) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._listener, limit=MAX_HEAD_BYTES)
        await self._stop.wait()
        server.close()
        await _cancelled(self._open)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        if len(self._open) >= MAX_CONNECTIONS:
            next(iter(self._open)).cancel()
        self._open[task] = None
        try:
            await self._converse(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client disconnected, or took too long
        except Exception:  # a request's boundary: a bad client must not affect the others
            log.exception("a monitoring page failed")
        finally:
            del self._open[task]
            writer.transport.abort()  # everything is written, or the rest no longer matters

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        host = str((writer.get_extra_info("peername") or ("",))[0])
        wait_s = self._pace.take(host, PATIENCE_S)
        if wait_s is None:
            answer, with_body = _text(HTTPStatus.TOO_MANY_REQUESTS, "ask less often", **{"Retry-After": "5"}), True
        else:
            await asyncio.sleep(wait_s)
            answer, with_body = await self._listen_and_answer(reader, host)
        writer.transport.set_write_buffer_limits(0)  # makes `drain` wait for the last byte
        writer.write(answer.head() + (answer.body if with_body else b""))
        async with asyncio.timeout(WRITE_S):
            await writer.drain()

    async def _listen_and_answer(self, reader: asyncio.StreamReader, host: str) -> tuple[_Answer, bool]:
        """The answer, and whether its body is wanted."""
        try:
            async with asyncio.timeout(HEAD_S):
                request = _parse(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            text = f"more than {MAX_HEAD_BYTES} bytes of headers"
            return _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text), True
        if request is None:
            return _text(HTTPStatus.BAD_REQUEST, "this is not HTTP"), True
        if action := self._actions.get(request.path):
            return await self._act(action, request, reader, host), request.method != "HEAD"
        if request.method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET it", Allow="GET, HEAD"), True
        return await self._answer(request, host), request.method == "GET"

    async def _act(self, action: Action, request: _Request, reader: asyncio.StreamReader, host: str) -> _Answer:
        if request.method != "POST":
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "POST it", Allow="POST")
        if denied := self._gate.denies(host, request.headers.get("authorization")):
            return _text(denied.http_status, denied.reason)
        if "origin" in request.headers:  # a page that the operator's browser has open
            return _text(HTTPStatus.FORBIDDEN, "not from a web page")
        async with asyncio.timeout(HEAD_S):
            body = await _read_body(request, reader)
        if isinstance(body, HTTPStatus):
            return _text(body, f"send a body of at most {MAX_BODY_BYTES} bytes, with Content-Length")
        return await _ask(lambda: action(body))

    async def _answer(self, request: _Request, host: str) -> _Answer:
        path = request.path
        if path == "/metrics":
            body, kind = metrics_page(self._registry, request.headers.get("accept"))
            return _Answer(HTTPStatus.OK, body, kind)
        if check := self._checks.get(path):
            reason = check()
            return _text(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, reason or "ok")
        if page := self._pages.get(path):
            if denied := self._gate.denies(host, request.headers.get("authorization")):
                return _text(denied.http_status, denied.reason)
            return await _ask(page)
        known = ["/metrics", *self._checks, *self._pages, *self._actions]
        return _text(HTTPStatus.NOT_FOUND, "try " + " ".join(known))


async def _ask(page: Page) -> _Answer:
    try:
        async with asyncio.timeout(ANSWER_S):
            status, text = await page()
    except BatonError as error:
        return _text(HTTPStatus(error.http_status), error.message)
    except TimeoutError:
        return _text(HTTPStatus.GATEWAY_TIMEOUT, f"no answer within {ANSWER_S:g} s")
    if not text.startswith("{"):
        return _text(status, text)
    return _Answer(status, (text + "\n").encode(), "application/json; charset=utf-8")


async def _read_body(request: _Request, reader: asyncio.StreamReader) -> bytes | HTTPStatus:
    """The body, or why it is not read."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not (length.isascii() and length.isdecimal()):
        return HTTPStatus.LENGTH_REQUIRED
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return await reader.readexactly(int(length))


def _parse(head: bytes) -> _Request | None:
    """None if it is not HTTP/1."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return None
        headers[name.lower()] = value.strip()
    return _Request(words[0], words[1].partition("?")[0], headers)


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in [*tasks]:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
