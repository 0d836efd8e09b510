"""One client's WebSocket: uvicorn's, with bounds on memory and time whatever the client sends or does not read.

It counts as a connection like any other. Messages count as bodies until the application takes them, which counts those
that it has wait.
"""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from baton.errors import Overloaded
from router.http.bounded_writes import BoundedWrites
from router.http.limits import Bodies, ConnectionLimits
from router.http.websocket import TRY_AGAIN_LATER, WebSocketState

_INVALID_DATA = 1007
"""The code of a close."""


class WebSocketConnection(BoundedWrites, WebSocketsSansIOProtocol):
    """The application finds its WebSocketState as `websocket` in the scope's state."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        bodies: Bodies,
    ) -> None:
        self._state = WebSocketState()
        super().__init__(config, server_state, {**app_state, "websocket": self._state})
        self._limits = limits
        self._bodies = bodies
        self._held_bytes = 0

    def data_received(self, data: bytes) -> None:
        if not self.handshake_complete or self._take(len(data)):
            super().data_received(data)
            self._release()
            if not self.handshake_initiated:
                self.transport.close()  # it was no valid handshake: that is known at once, since the request came whole
        if self.transport.is_closing() or self.close_sent:  # which does not keep it from being sent pongs
            self._close_in_time()

    def handle_cont(self, event: Frame) -> None:
        """As one piece: many small ones would take several times as much memory as they count."""
        if len(self.frames) == 1:
            self.frames.append(bytearray())  # type: ignore[arg-type]  # as good as bytes
        self.frames[1] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        self.frames = [b"".join(self.frames)]
        if self.curr_msg_data_type == "text" and not _is_text(self.frames[0]):
            self.frames = []
            self._fail(_INVALID_DATA, "a text must be UTF-8")
            return
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        self._release()
        if not self.writable.is_set():
            self._stop_reading()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._close_in_time()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._close_in_time()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._close_in_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        self._give_back(self._held_bytes)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops: an answer under way may end, and the application closes after it."""
        self._state.closing = True
        if not self._state.busy:
            super().shutdown()
            self._close_in_time()

    def pause_writing(self) -> None:
        """Read no more either: a client may send pings without end, and each is answered."""
        super().pause_writing()
        self._stop_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing() and not self.read_paused:
            self.transport.resume_reading()

    def _stop_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _take(self, num_bytes: int) -> bool:
        """Count bytes that came. False: there is no room for them, and the connection ends."""
        try:
            self._bodies.take(num_bytes)
        except Overloaded as error:
            self._fail(TRY_AGAIN_LATER, error.message)
            return False
        self._held_bytes += num_bytes
        return True

    def _fail(self, code: int, reason: str) -> None:
        if not self.close_sent:
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def _release(self) -> None:
        """Once all messages that came have been taken, or will not be, count only what has come of the next one."""
        if self.queue.empty() or self.close_sent:
            kept_bytes = len(self.conn.reader.buffer) + sum(map(len, self.frames))
            self._give_back(max(0, self._held_bytes - kept_bytes))

    def _give_back(self, num_bytes: int) -> None:
        self._bodies.give_back(num_bytes)
        self._held_bytes -= num_bytes


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
