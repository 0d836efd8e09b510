"""The socket at which a transport is dialled."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket

log = logging.getLogger(__name__)


class Listener:
    """Accepts connections. Owns the socket and a spare descriptor. If a process has no other descriptor left, it uses
    the spare one to accept a connection and close it. Otherwise the connection would stay at the head of the queue: the
    process that dials would get no answer, and the thread that waits here would be woken again and again."""

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._socket = listening
        self.host, self.port = listening.getsockname()[:2]
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """The next connection and its host. None: it is closed already."""
        try:
            connection, (host, *_) = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._hang_up(error)
            return None
        return connection, host.removeprefix("::ffff:")

    def close(self) -> None:
        self._socket.close()
        self._give_up_spare()

    def _hang_up(self, error: OSError) -> None:
        log.warning("connection refused port=%d reason=%s", self.port, error)
        self._give_up_spare()
        with contextlib.suppress(OSError):  # another thread may take the descriptor that was given up
            self._socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
