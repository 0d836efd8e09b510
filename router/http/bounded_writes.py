"""What both kinds of connection do about a client that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios

from baton.rpc.silence import SilenceWatch
from router.http.limits import ConnectionLimits

log = logging.getLogger(__name__)


class BoundedWrites(asyncio.Protocol):
    """Before a protocol of uvicorn's: cuts off a client that takes nothing of what waits for it for `write_timeout_s`.
    However slowly it reads, it may go on."""

    transport: asyncio.Transport
    client: tuple[str, int] | None
    _limits: ConnectionLimits
    _write_timer: SilenceWatch | None = None
    _num_unread: int

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_timer()

    def _close_in_time(self) -> None:
        """Bound the close: a transport that closes waits until its client has taken the rest."""
        if self.transport.get_write_buffer_size():
            self._start_write_timer()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._num_unread = self._count_unread()
            self._write_timer = SilenceWatch(self._limits.write_timeout_s, self._does_not_read, self._has_read)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _has_read(self) -> bool:
        """Whether the client has taken something since the last call."""
        before, self._num_unread = self._num_unread, self._count_unread()
        return self._num_unread < before

    def _count_unread(self) -> int:
        """Bytes that the client has not taken, in our buffer and in the kernel's, which takes more of ours only when a
        third of its own is free: up to a megabyte, for which a slow client needs longer than the limit."""
        in_kernel = bytes(4)
        with contextlib.suppress(OSError):  # it is closed
            in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _does_not_read(self) -> None:
        log.info("cut off client=%s: it did not read for %g s", self.client, self._limits.write_timeout_s)
        self.transport.abort()
