"""One client's HTTP/1.1 connection: uvicorn's, with bounds on size and time whatever the client sends or does not read.

A request that is wrong before the application sees it is answered here, in its API's form; then the connection ends. If
the application refuses a request early, the connection stays open, provided that the rest of the request comes soon.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.rpc.silence import SilenceWatch
from router.http.body_writer import BodyWriter
from router.http.bounded_writes import BoundedWrites
from router.http.errors import error_body
from router.http.limits import ConnectionLimits, LimitLog, WebSockets
from router.requests.admission import RETRY_AFTER_S

log = logging.getLogger(__name__)

MAX_URL_BYTES = 8 * 1024
MAX_PIPELINED = 64
"""Requests that may wait behind the one being answered. Clients hardly ever pipeline."""
_MAX_TURNED_AWAY = 128
"""Connections beyond the limit that may be open at the same time to be told so; they need descriptors too."""
_HEADER_COST = 32
_LAST_SHARE = 0.1
"""Of the time without a request, which is counted while this process runs: a timer for each request is cheaper."""


class SharedConnectionState:
    """State that the connections of one server share. `websockets`, `on_full`: see HttpServer."""

    def __init__(self, limits: ConnectionLimits, websockets: WebSockets | None, on_full: Callable[[], object]) -> None:
        self.limits = limits
        self.websockets = websockets
        self.num_turned_away = 0
        self._on_full = on_full
        self._full = LimitLog(f"all --max-connections={limits.max_connections} are in use")

    def count_refusal(self) -> None:
        """Of a connection beyond the limit."""
        self._on_full()
        self._full.count_refusal()


class _Reading(enum.Enum):
    """Which piece of a request is coming in."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class _Refused(Exception):
    """Raised in the parser's callbacks to stop the parser."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Connection(BoundedWrites, HttpToolsProtocol):
    """Timers run only for data that did not come or go at once: a request that arrives whole starts none."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        loop: asyncio.AbstractEventLoop,
        shared: SharedConnectionState,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self._shared = shared
        self._limits = shared.limits
        self.timeout_keep_alive *= 1 - _LAST_SHARE  # type: ignore[assignment]  # goes to call_later
        self.url = b""
        self._plain_head = b""  # of a request that asks for another protocol, as if it had not
        self._reading = _Reading.NOTHING
        self._overhead_bytes = 0  # fed since the last head or piece of a body ended: all else has no end of its own
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest; with pipelining they differ
        self._body_writer: BodyWriter | None = None  # of the running one
        self._refused = False
        self._turned_away = False
        self._read_timer: SilenceWatch | None = None

    # ---- connections ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) <= self._limits.max_connections:
            self._watch()
            return
        self.connections.discard(self)
        self._shared.count_refusal()
        if self._shared.num_turned_away >= _MAX_TURNED_AWAY:
            transport.abort()
            return
        self._turned_away = True
        self._shared.num_turned_away += 1
        self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        self._leave_running()
        if self._turned_away:
            self._shared.num_turned_away -= 1
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()
            self._close_in_time()

    def timeout_keep_alive_handler(self) -> None:
        """The client has been idle for most of its time, unless this process did not run. Then a request that has come
        is read in the rest of it."""
        rest_s = self._limits.idle_timeout_s - self.timeout_keep_alive
        self.timeout_keep_alive_task = SilenceWatch(rest_s, self._close_idle)  # type: ignore[assignment]  # as much of it

    def _close_idle(self) -> None:
        super().timeout_keep_alive_handler()
        self._close_in_time()

    # ---- what comes ----

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._overhead_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refused):
                self._refuse(cause.status, cause.message)
            else:
                self._refuse(400, f"This is not a valid HTTP/1.1 request: {cause or error}")
            return
        if self._overhead_bytes > self._limits.max_header_bytes:
            refusal = self._too_large()
            self._refuse(refusal.status, refusal.message)
        elif self._reading is not _Reading.NOTHING or self.cycle is None or self.cycle.response_complete:
            self._watch()

    def _feed(self, data: bytes) -> None:
        """Parse it. What follows a head that asks for an upgrade, a parser takes for the other protocol. Where there is
        none, another parser goes on with a head that does not ask: the request has its body, and others may follow.

        Raises HttpParserUpgrade where a WebSocket begins, and HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._plain_head:
                    raise
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                data, self._plain_head = self._plain_head + data[upgrade.args[0] :], b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = _Reading.HEAD

    def on_headers_complete(self) -> None:
        head_bytes, num_hosts = len(self.url), 0
        for name, value in self.headers:
            head_bytes += len(name) + len(value) + _HEADER_COST
            num_hosts += name == b"host"
        if head_bytes > self._limits.max_header_bytes or len(self.url) > MAX_URL_BYTES:
            raise self._too_large()
        if self.parser.should_upgrade():
            self._check_upgrade()
            if self._plain_head:
                return
        if num_hosts != 1 and (num_hosts or self.parser.get_http_version() != "1.0"):  # RFC 9112, section 3.2
            raise _Refused(400, f"The request has {num_hosts} headers `Host` instead of one.")
        if self._read_timer is not None:
            self._stop_read_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(400, f"more than {MAX_PIPELINED} requests at once on one connection")
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"  # whose clients know no such answer
        if self.url[:1] != b"/" and httptools.parse_url(self.url).path is None:  # http://host
            address, mark, query = self.url.partition(b"?")
            self.url = address + b"/" + mark + query
        self.scope["headers"] = [*self.headers]  # trailers, which nobody on the way checks, come to uvicorn's list
        super().on_headers_complete()
        self._overhead_bytes = 0
        self._reading = _Reading.BODY

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:  # only its head has been read
            return
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        if self._read_timer is not None:
            self._stop_read_timer()

    def _check_upgrade(self) -> None:
        """Prepare for a WebSocket, or for reading the request as if it had not asked. Raises _Refused."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise _Refused(400, "CONNECT is for proxies.")
        if self._get_upgrade() == b"websocket":
            self._prepare_upgrade()
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        self._plain_head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))

    def _prepare_upgrade(self) -> None:
        """Let uvicorn's code upgrade when the request has come. Raises _Refused."""
        websockets = self._shared.websockets
        if websockets is None or self._addressed()["path"] not in websockets.paths:
            raise _Refused(400, "There is no WebSocket here: answers are streamed as server-sent events.")
        if self.parser.get_method() != b"GET":
            raise _Refused(400, "A WebSocket begins with GET.")
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.get_write_buffer_size():
            raise _Refused(400, "A WebSocket cannot begin before the answers to earlier requests have been read.")
        from router.http.websocket_connection import (
            WebSocketConnection,
        )  # late: few routers need it, and it takes 0.2 s

        self.ws_protocol_class = partial(WebSocketConnection, limits=self._limits, bodies=websockets.bodies)  # type: ignore[assignment]

    def _upgrade(self) -> None:
        """The connection goes on as a WebSocket's, with timers of its own."""
        self._stop_read_timer()
        self._stop_write_timer()
        self.handle_websocket_upgrade()

    def _too_large(self) -> _Refused:
        if len(self.url) > MAX_URL_BYTES:
            return _Refused(414, f"The request's address is longer than {MAX_URL_BYTES} bytes.")
        return _Refused(431, f"The request's headers are larger than {self._limits.max_header_bytes} bytes.")

    def _watch(self) -> None:
        """Start the clock for what the client has yet to send, unless it runs already or it is our turn."""
        if self._read_timer is not None:
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._reading is _Reading.NOTHING:
            if not answering and self.timeout_keep_alive_task is None:
                idle_s, end = self.timeout_keep_alive, self.timeout_keep_alive_handler
                self.timeout_keep_alive_task = self.loop.call_later(idle_s, end)
        elif self._reading is _Reading.HEAD:
            if not answering:
                self._wait_for_rest(self._limits.header_timeout_s, self._late)
        elif not self.pipeline:
            self._wait_for_rest(self._limits.body_timeout_s, self._late)

    def _late(self) -> None:
        self._stop_read_timer()
        if self.flow.read_paused:  # by us
            self._watch()
        elif self._reading is _Reading.HEAD:
            self._refuse(408, f"The request's headers did not come within {self._limits.header_timeout_s:g} s.")
        else:
            self._refuse(408, f"The request's body did not come within {self._limits.body_timeout_s:g} s.")

    # ---- what goes ----

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._body_writer = BodyWriter(cycle, self.loop, self._close)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._body_writer is not None:
            self._body_writer.end()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._reading is _Reading.BODY and self.cycle.response_complete:
            self._stop_read_timer()
            self._wait_for_rest(self._limits.linger_s, self.transport.abort)
        elif self._reading is not _Reading.NOTHING:  # the next has begun
            self._unset_keepalive_if_required()
            self._watch()

    def _close(self) -> None:
        """After an answer that is the last. Whoever still sends the request would find the connection reset, and might
        not get to read the answer."""
        answered = self._running is not None and self._running is self.cycle and self._running.response_complete
        if answered and self._reading is _Reading.BODY:
            self._refused = True
            self._half_close()
        else:
            self.transport.close()
            self._close_in_time()

    def _half_close(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._body_writer is not None:
            self._body_writer.resumed()

    def _refuse(self, status: int, message: str) -> None:
        """Say why, once, in place of an answer that has not begun; then only wait until the client has read it."""
        level = logging.DEBUG if self._turned_away else logging.INFO  # refused connections share one line
        log.log(level, "refused status=%d client=%s: %s", status, self.client, message)
        self._refused = True
        self._stop_read_timer()
        self.pipeline.clear()
        if self._leave_running():
            self.transport.abort()
            return
        body = json.dumps(error_body(self._addressed(), status, message)).encode()
        self.transport.write(_answer(status, body, self.server_state.default_headers))
        self._half_close()
        self.flow.resume_reading()
        self._wait_for_rest(self._limits.linger_s, self.transport.abort)

    def _addressed(self) -> dict[str, str]:
        """The path of the newest request, as far as it has come, in the form of an ASGI scope."""
        return {"path": self.url.partition(b"?")[0].decode("latin-1")}

    def _leave_running(self) -> bool:
        """Tell the request that is being answered that its client has left. Returns whether its answer had begun."""
        cycle = self._running
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False  # nothing can be sent any more
        cycle.message_event.set()
        if self._body_writer is not None:
            self._body_writer.left()
        return cycle.response_started

    # ---- timers ----

    def _wait_for_rest(self, limit_s: float, late: Callable[[], object]) -> None:
        """Call `late` unless the timer is stopped within `limit_s`."""
        self._read_timer = SilenceWatch(limit_s, late)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def _answer(status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *([(b"retry-after", b"%d" % RETRY_AFTER_S)] if status == 503 else []),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in (*headers, *own))
    return STATUS_LINE[status] + lines + b"\r\n" + body
