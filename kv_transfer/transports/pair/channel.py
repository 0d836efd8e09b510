"""Control messages between two transports: frames over a TCP connection, with non-blocking reads and writes."""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
from dataclasses import dataclass

_HEAD = struct.Struct("<IBQQ")  # bytes of the payload, kind, tag, num_bytes
_MOST = 1 << 20
_READ = 1 << 16


class Kind(enum.IntEnum):
    """
    pusher                                                   receiver
    HELLO  (the receiver's id, the pusher's id)       --->
                                               <---   WELCOME
    OPEN   (use this one of the connections dialled)  --->
                                               <---   PROOF   with a cluster secret
                                               <---   GRANT   a receive is posted
    NOTE   (from the carrier)                         --->
    BEGIN  (the header) the bytes are on the way      --->
    END    the bytes are all there                    --->
    LONG   more bytes than were granted: not sent     --->
    STRAY  stores into this slot end in no message    --->
                                               <---   (end of stream)  nothing more is granted
    BYE    nothing more is sent                       --->
    (end of stream)  the pusher accesses no slot any more
    """

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    GRANT = 4
    NOTE = 5
    BEGIN = 6
    END = 7
    LONG = 8
    BYE = 9
    STRAY = 10
    PROOF = 11


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    tag: int = 0
    num_bytes: int = 0
    payload: bytes = b""


class Channel:
    """One end of the connection; owns the socket. `lost` is set once nothing more can be received; `dialling` is set
    until the connection is established. One thread, except `send`: if the socket does not take all that another thread
    sends, the rest is written by the next call that writes.

    A frame above 1 MiB ends the connection, so unauthenticated input costs little memory.
    """

    def __init__(self, connection: socket.socket, dialling: bool = False) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.dialling = dialling
        self.lost = False
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._mute = False
        self._lock = threading.Lock()  # guards the outbox, and writing

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants(self) -> int:
        """The epoll mask to wait for."""
        if self.dialling:
            return select.EPOLLOUT
        return (0 if self.lost else select.EPOLLIN) | (select.EPOLLOUT if self._outbox else 0)

    def send(
        self, kind: Kind, tag: int = 0, num_bytes: int = 0, payload: bytes = b"", more_follows: bool = False
    ) -> None:
        """more_follows: the next call writes both frames."""
        with self._lock:
            if not self._mute:
                self._outbox += _HEAD.pack(len(payload), kind, tag, num_bytes) + payload
                if not more_follows:
                    self._write()

    def flush(self) -> None:
        """Write as much as the socket takes."""
        if self._outbox:
            with self._lock:
                self._write()

    def hang_up(self) -> None:
        """Send nothing more, but keep receiving."""
        with self._lock:
            self._mute = True
            self._outbox.clear()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.lost = True

    def receive(self) -> list[Frame]:
        """The frames that have arrived, from about 1 MiB at most, so that one busy sender does not starve other
        connections."""
        try:
            while len(self._inbox) <= _MOST + _HEAD.size:
                data = self.socket.recv(_READ)
                if not data:
                    self.lost = True
                    break
                self._inbox += data
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        self.lost = True
        with self._lock:
            self._mute = True
            self._outbox.clear()
            self.socket.close()

    def _write(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:  # `receive` notices it too
            self._outbox.clear()
            self._mute = True

    def _next(self) -> Frame | None:
        if len(self._inbox) < _HEAD.size:
            return None
        length, kind, tag, num_bytes = _HEAD.unpack_from(self._inbox)
        if length > _MOST or kind not in _KINDS:
            self.lost = True
            self._inbox.clear()
            return None
        end = _HEAD.size + length
        if len(self._inbox) < end:
            return None
        frame = Frame(Kind(kind), tag, num_bytes, bytes(self._inbox[_HEAD.size : end]))
        del self._inbox[:end]
        return frame
