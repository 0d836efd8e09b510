"""What both kinds of connection do about a client that does not read."""

from __future__ import annotations

import asyncio
import logging

from baton.rpc.silence import SilenceWatch
from router.http.limits import ConnectionLimits

log = logging.getLogger(__name__)


class BoundedWrites(asyncio.Protocol):
    """Before a protocol of uvicorn's: cuts off a client for which what is written has waited `write_timeout_s`."""

    transport: asyncio.Transport
    client: tuple[str, int] | None
    _limits: ConnectionLimits
    _write_timer: SilenceWatch | None = None

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
            self._write_timer = SilenceWatch(self._limits.write_timeout_s, self._does_not_read)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _does_not_read(self) -> None:
        log.info("cut off client=%s: it did not read for %g s", self.client, self._limits.write_timeout_s)
        self.transport.abort()
