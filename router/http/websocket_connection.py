"""One client's WebSocket: uvicorn's, with bounds on memory and time whatever the client sends or does not read.

It counts as a connection like any other. Messages count as bodies until the application takes them, which counts those
that it has wait.
"""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

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
        if self.handshake_complete and not self._take(len(data)):
            return
        super().data_received(data)
        self._release()
        if not self.handshake_initiated:
            self.transport.close()  # it was no valid handshake: that is known at once, since the request came whole

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_text(b"".join(self.frames)):
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        self._give_back()
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
            self._close_in_time()

    def _release(self) -> None:
        """Count nothing once all that came has been taken."""
        if not self.frames and not self.conn.reader.buffer and self.queue.empty():
            self._give_back()

    def _give_back(self) -> None:
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
