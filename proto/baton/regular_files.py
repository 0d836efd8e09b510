"""Reads the files that flags name for as long as a process runs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path) -> bytes:
    """The file's content. Raises OSError, also for what is no regular file: a pipe has its content only once, and one
    that nobody writes to, or a device, would never be read to its end."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


def stamp_of(path: Path) -> tuple[int, ...]:
    """Equal to that of before as long as the file has not been changed or replaced. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _open_at_once(name: str, flags: int) -> int:
    """Does not wait until somebody writes to a pipe."""
    return os.open(name, flags | os.O_NONBLOCK)
