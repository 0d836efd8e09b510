"""A connection between two processes that trust each other. Each message is a line of JSON."""

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
    a malformed line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self._socket, self._sending = connection, threading.Lock()
        self._data = b""
        self.num_silent = 0
        """Time slices in which this node listened and received nothing, as its reader counts them."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived since the last call. Waits for data, which may be less than a line."""
        return self._receive(_RECEIVE_BYTES)

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """Read the next message, and nothing that follows it. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if (message := self.receive_first()) is not None:
                return message
        raise TimeoutError(f"nothing has come for {timeout_s:g} s")

    def receive_first(self) -> dict[str, Any] | None:
        """Read the next message, and nothing that follows it. Waits for data; None: it is not complete yet."""
        line, newline, _ = self._socket.recv(_RECEIVE_BYTES, socket.MSG_PEEK).partition(b"\n")
        messages = self._receive(len(line) + len(newline) or 1)
        return messages[0] if messages else None

    def _receive(self, num_bytes: int) -> list[dict[str, Any]]:
        data = self._socket.recv(num_bytes)
        if not data:
            raise ConnectionResetError("the other node has closed the connection")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _MAX_LINE:
            raise OSError("a line is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise OSError(f"what it sent is not JSON: {error}") from error
        if not all(isinstance(one, dict) for one in messages):
            raise OSError("what it sent is no object")
        self.num_silent = 0
        return messages

    def release(self) -> socket.socket:
        """Give up the connection, to be used for another format. Raises OSError if it is in the middle of a line."""
        if self._data:
            raise OSError("what it sent ends in the middle of a line")
        return self._socket

    def close(self) -> None:
        self._socket.close()
