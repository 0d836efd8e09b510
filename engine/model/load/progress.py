"""Log lines while weights load, which may take minutes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.model.memory import GIB

log = logging.getLogger(__name__)

PERIOD_S = 5.0


class Loaded:
    """Counts loaded bytes, from any thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._count = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._count += num_bytes

    @property
    def count(self) -> int:
        return self._count


@contextmanager
def progress_logged(model: str, loaded: Loaded | None = None, period_s: float = PERIOD_S) -> Iterator[None]:
    """Log a line every `period_s` while the body runs. loaded: the progress; None: it is not known."""
    began = time.monotonic()

    def line() -> None:
        seconds = time.monotonic() - began
        if loaded is None:
            log.info("weights loading model=%s seconds=%.0f", model, seconds)
            return
        gib, total_gib = loaded.count / GIB, loaded.total / GIB
        percent = 100 * loaded.count // max(1, loaded.total)
        text = "weights loading model=%s gib=%.2f total_gib=%.2f percent=%d seconds=%.0f"
        log.info(text, model, gib, total_gib, percent, seconds)

    with _every(period_s, line):
        yield


@contextmanager
def _every(period_s: float, do: Callable[[], None]) -> Iterator[None]:
    done = threading.Event()

    def run() -> None:
        while not done.wait(period_s):
            do()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
