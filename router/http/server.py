"""The HTTP server: uvicorn with connections of `router.http.connection`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from router.http.connection import Connection, SharedConnectionState
from router.http.limits import ConnectionLimits, WebSockets

_BACKLOG = 2048
_DATE_S = 1.0
"""How often the header Date is made anew: it counts seconds."""


class HttpServer(uvicorn.Server):
    """Serves `app` from `serve` until `stop`, then for `drain_timeout_s` more. `up` is set once it accepts
    connections. It installs no signal handlers, because the process has its own. `websockets`: None: there are none.
    `on_full` is called for each connection beyond the limit."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        drain_timeout_s: float = 0.0,
        websockets: WebSockets | None = None,
        on_full: Callable[[], object] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,  # so that no other is looked for; `startup` makes them
            ws="none",  # likewise: a connection that may become a WebSocket's looks for it
            ws_per_message_deflate=False,  # a small message could become a large one
            ws_max_size=websockets.bodies.max_bytes if websockets else 0,
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address or scheme
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # goes to call_later
            timeout_graceful_shutdown=int(drain_timeout_s) + 1,
        )
        super().__init__(config)
        self.up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._shared = SharedConnectionState(limits, websockets, on_full)
        self._tls = tls

    def connection(self) -> Connection:
        """For a new client."""
        return Connection(self.config, self.server_state, asyncio.get_running_loop(), self._shared)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._shared.limits.header_timeout_s if self._tls else None  # asyncio takes none without TLS
        self.servers = [
            await loop.create_server(
                self.connection,
                sock=listener,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
            for listener in sockets or ()
        ]
        self.started = True
        self.up.set()

    def stop(self) -> None:
        """Have `serve` take no more requests, and return when those under way are answered."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`. uvicorn looks for it ten times a second instead, as long as the server runs."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Without a connection there is nothing to wait for; uvicorn waits a tenth of a second all the same."""
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
