"""What is made of files, and made again when others have taken their place: certificates are renewed while a process
serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from baton.regular_files import stamp_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class Renewed(Generic[T]):
    """`make` reads all of `paths`. What it raises at construction is raised; ValueError later, as between the renewals
    of a certificate and of its key, only goes into the log, and the last result stays. For any threads."""

    def __init__(self, paths: Iterable[Path], make: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._make = make
        self._lock = threading.Lock()
        self._stamps = self._look()  # before the files are read: what changes meanwhile is read again
        self._made = make()

    def current(self) -> T:
        """The same object until a file changes."""
        with self._lock:
            if (stamps := self._look()) != self._stamps:
                self._stamps = stamps
                try:
                    self._made = self._make()
                    log.info("read again after a change files=%s", ",".join(map(str, self._paths)))
                except ValueError as error:
                    log.error("%s; what was read before stays in use", error)
            return self._made

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp_or_none, self._paths))


def _stamp_or_none(path: Path) -> tuple[int, ...] | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
