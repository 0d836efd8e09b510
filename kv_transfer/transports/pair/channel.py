"""Control messages between two transports: frames over a TCP connection, read and written without waiting."""

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
    HELLO  (whom it takes the other for, who it is)   --->
                                               <---   WELCOME
    OPEN   (this connection it is, of several)        --->
                                               <---   PROOF   where there is a cluster secret
                                               <---   GRANT   a receive is posted
    NOTE   (the carrier's own)                        --->
    BEGIN  (the header) the bytes move now            --->
    END    they did, or could not                     --->
    LONG   more bytes than were granted: not sent     --->
    STRAY  bytes land there that belong to no message --->
                                               <---   (end of stream)  nothing more is granted
    BYE    nothing more is sent                       --->
    (end of stream)  nothing is read, or written, any more
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
    """One end of the connection; owns the socket. `lost` is set once nothing more can be heard; `dialling` is on until
    somebody is reached. One thread, but for `send`: what another sends and the network does not take goes with that
    thread's next call.

    What a stranger may send costs at most a MiB of memory, and then the connection.
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
        self._lock = threading.Lock()  # over the outbox, and writing

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
        """more_follows: leave it to the next call to write both."""
        with self._lock:
            if not self._mute:
                self._outbox += _HEAD.pack(len(payload), kind, tag, num_bytes) + payload
                if not more_follows:
                    self._write()

    def flush(self) -> None:
        """Write what the network takes."""
        if self._outbox:
            with self._lock:
                self._write()

    def hang_up(self) -> None:
        """Say nothing more; go on hearing."""
        with self._lock:
            self._mute = True
            self._outbox.clear()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.lost = True

    def receive(self) -> list[Frame]:
        """The frames that are here; of more than a MiB the first, so that who sends without end keeps nobody else from
        being heard."""
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
        except OSError:  # the reader learns of it too
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
