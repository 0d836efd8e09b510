"""A connection between nodes that know each other, over which lines of JSON go."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from typing import Any

_MAX_LINE = 64 * 1024
_RECEIVE_BYTES = 4096


class PeerLink:
    """Any thread may `send`; one thread reads. Raises OSError once the connection is broken, or the other node sends
    what is no such line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self._socket, self._sending = connection, threading.Lock()
        self._data = b""
        self.num_silent = 0
        """Slices in which this node listened and heard nothing, as its reader counts them."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **said: Any) -> None:
        with self._sending:
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come since the last call; waits for something, which may be less than a line."""
        return self._receive(_RECEIVE_BYTES)

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """The next line, and nothing of what follows. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if (said := self.receive_first()) is not None:
                return said
        raise TimeoutError(f"nothing has come for {timeout_s:g} s")

    def receive_first(self) -> dict[str, Any] | None:
        """The next line, and nothing of what follows; waits for something, which may be less than that: None."""
        line, newline, _ = self._socket.recv(_RECEIVE_BYTES, socket.MSG_PEEK).partition(b"\n")
        said = self._receive(len(line) + len(newline) or 1)
        return said[0] if said else None

    def _receive(self, num_bytes: int) -> list[dict[str, Any]]:
        data = self._socket.recv(num_bytes)
        if not data:
            raise ConnectionResetError("the other node has closed the connection")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _MAX_LINE:
            raise OSError("a line is too long")
        try:
            said = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise OSError(f"what it sent is not JSON: {error}") from error
        if not all(isinstance(one, dict) for one in said):
            raise OSError("what it sent is no object")
        self.num_silent = 0
        return said

    def release(self) -> socket.socket:
        """The connection, for whoever goes on with it in another form. Raises OSError if it is in the middle of a
        line."""
        if self._data:
            raise OSError("what it sent ends in the middle of a line")
        return self._socket

    def close(self) -> None:
        self._socket.close()
