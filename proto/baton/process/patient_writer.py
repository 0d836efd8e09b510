"""Writes lines that somebody should read, and does not wait long for somebody who has stopped reading.

A pipe has room for 64 KiB, a terminal that was stopped (Ctrl-S) for less. A process that waited for more would not
serve, and could not even be told to end.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 1.0
"""How long a reader may read nothing before lines are lost. After that, until it reads again, none is waited for."""
_PIECE_BYTES = select.PIPE_BUF
"""What a pipe that can be written to certainly has room for."""


class PatientWriter:
    """Writes to `stream`, which is used directly if it is no file. Calls must not overlap."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd: int | None = None
        with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
            self._fd = stream.fileno()
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLOUT)
        self._patience_s = PATIENCE_S
        self._broken_off = False
        self._num_lost = 0

    def write_or_count(self, text: str, lost: Callable[[int], str]) -> None:
        """Write the text, or count it as lost, also if the reader is gone or the disk full, which are no reasons to
        stop serving. What is written next comes after `lost` of how many."""
        if self._num_lost and self._written(lost(self._num_lost)):
            self._num_lost = 0
        if not self._written(text):
            self._num_lost += 1

    def _written(self, text: str) -> bool:
        try:
            return self.write(text)
        except OSError:
            return False

    def write(self, text: str) -> bool:
        """False: it is lost, or the rest of it, since nobody reads. Raises OSError if the reader is gone or the disk
        full."""
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return True
        begin = "\n" if self._broken_off else ""
        rest = memoryview((begin + text).encode(errors="backslashreplace"))
        while rest:
            if not self._poll.poll(self._patience_s * 1e3):
                self._patience_s = 0.0
                return False
            written = os.write(self._fd, rest[:_PIECE_BYTES])
            rest = rest[written:]
            self._broken_off = bool(rest)
        self._patience_s = PATIENCE_S
        return True
