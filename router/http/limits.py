"""Limits of the HTTP server: for one client, and for all clients together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import Overloaded
from router.refusals import OnRefused, counted, uncounted

log = logging.getLogger(__name__)

_QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of each connection, except `max_connections`. Times are in seconds.

    `max_header_bytes`: the request line and all headers; each counts 32 bytes in addition to its text, as in HTTP/2.
    `header_timeout_s`, `body_timeout_s`: from the first byte of a request's head or body to the last.
    `write_timeout_s`: for how long a client may take nothing of what waits for it. `idle_timeout_s`: between requests.
    `linger_s`: how long a refused client may go on sending; one that is cut off while it sends does not see the reason.
    """

    max_connections: int = 8192
    max_header_bytes: int = 32 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    linger_s: float = 2.0


class LimitLog:
    """Logs when a limit is first hit, then at most once a minute, so that strangers cannot fill the log."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._clock = clock
        self._quiet_until = float("-inf")
        self._num_unsaid = 0

    def count_refusal(self) -> None:
        self._num_unsaid += 1
        now = self._clock()
        if now >= self._quiet_until:
            log.warning("%s refused=%d", self._text, self._num_unsaid)
            self._quiet_until, self._num_unsaid = now + _QUIET_S, 0


class Bodies:
    """Bounds each request's body by `max_bytes`, and all bodies being read, over all connections, by `total_bytes`.

    Bytes count when they arrive, not when they are announced: a client must send them to take room from others.
    """

    def __init__(self, max_bytes: int, total_bytes: int, on_refused: OnRefused = uncounted) -> None:
        self.max_bytes = max_bytes
        self._total_bytes = total_bytes
        self._on_refused = on_refused
        self._held_bytes = 0
        self._log = LimitLog(f"the bodies of requests under way fill --max-buffered-body-bytes={total_bytes}")

    def take(self, num_bytes: int) -> None:
        """So many bytes have come. The caller gives back what it took. Raises Overloaded."""
        if self._held_bytes + num_bytes > self._total_bytes:
            self._log.count_refusal()
            raise counted(Overloaded("too many request bodies are being received at once"), self._on_refused)
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class WebSockets:
    """Where WebSockets may be opened. Their messages count as `bodies`."""

    paths: frozenset[str]
    bodies: Bodies


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the routes. `keep_alive_s`: how often an idle stream sends a sign of life; `websocket_idle_s`: how long
    a WebSocket may stay open without a request."""

    bodies: Bodies
    keep_alive_s: float
    websocket_idle_s: float
