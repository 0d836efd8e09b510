"""A connection between rank 0 and a rank on another host, over which steps go one way, and messages both ways.

    bytes of the body, 4 | content, 1 | body: a step's kind and values, int32 each; or a message, a JSON object

Little-endian. No input is executed: the worst that bytes can do is to end the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FULL_TIMEOUT_S = 600.0
"""How long to wait for a rank that reads nothing. A process that died or hangs is noticed much earlier
(`node.ranks.hosts`)."""
MAX_BODY_BYTES = 256 * 1024 * 1024
_HEAD = struct.Struct("<IB")
_KIND_BYTES = 4
_RECEIVE_BYTES = 256 * 1024


class Content(IntEnum):
    MESSAGE = 0
    STEP = 1


_CONTENTS = frozenset(Content)


class Frame(NamedTuple):
    content: Content
    body: bytearray

    def step(self) -> tuple[int, NDArray[np.int32]]:
        """The kind and the values of the step in this frame."""
        import numpy as np

        values = np.frombuffer(self.body, "<i4")  # writable, as torch wants it
        return int(values[0]), values[1:]

    def message(self) -> dict[str, Any]:
        """The message of this frame. Raises OSError if it is no JSON object."""
        try:
            message = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise OSError(f"what it sent is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise OSError("what it sent is no object")
        return message


def pack_step(kind: int, array: NDArray[np.int32]) -> bytes:
    values = array.reshape(-1).astype("<i4", copy=False)
    head = _HEAD.pack(_KIND_BYTES + values.nbytes, Content.STEP)
    return b"".join((head, struct.pack("<i", kind), values.tobytes()))


def pack_message(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(body), Content.MESSAGE) + body


class FrameReader:
    """Assembles frames from bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises OSError for bytes that are no frame."""
        self._data += data
        frames: list[Frame] = []
        start = 0
        while len(self._data) - start >= _HEAD.size:
            num_bytes, content = _HEAD.unpack_from(self._data, start)
            if content not in _CONTENTS or num_bytes > MAX_BODY_BYTES:
                raise OSError(f"no frame begins with {num_bytes} bytes of kind {content}")
            if content == Content.STEP and (num_bytes < _KIND_BYTES or num_bytes % _KIND_BYTES):
                raise OSError(f"no step has {num_bytes} bytes")
            end = start + _HEAD.size + num_bytes
            if len(self._data) < end:
                break
            frames.append(Frame(Content(content), self._data[start + _HEAD.size : end]))
            start = end
        del self._data[:start]
        return frames


class RankStream:
    """Any thread may send; one thread reads. Owns the connection. Raises OSError once it is broken, or if the
    other end reads nothing for `FULL_TIMEOUT_S`: it may have read a part of a frame, so this end closes the
    connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self._socket, self._sending, self._reader = connection, threading.Lock(), FrameReader()
        self.limit_sends(FULL_TIMEOUT_S)

    def fileno(self) -> int:
        return self._socket.fileno()

    def limit_sends(self, timeout_s: float) -> None:
        """How long a send may wait for an end that reads nothing."""
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))  # man 7 socket: SO_SNDTIMEO, a timeval
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send_message(self, **message: Any) -> None:
        self._send(pack_message(message))

    def send_step(self, kind: int, array: NDArray[np.int32]) -> None:
        self._send(pack_step(kind, array))

    def receive(self) -> list[Frame]:
        """The frames that have arrived since the last call. Waits for data, which may be less than a frame."""
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        return self._reader.feed(data)

    def close(self) -> None:
        self._shut_down()
        self._socket.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that reads
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, data: bytes) -> None:
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                self._shut_down()  # so that nothing can follow a part of a frame
                raise
