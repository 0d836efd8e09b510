"""Wakes a loop at given times, on a thread of its own."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls `wake` at each time given to `at` (`time.monotonic`), on a thread of its own, which ends with the
    process."""

    clock = staticmethod(time.monotonic)

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._times: list[float] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="alarm", daemon=True).start()

    def at(self, when: float) -> None:
        with self._changed:
            heapq.heappush(self._times, when)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._times or self._times[0] > time.monotonic():
                    left = self._times[0] - time.monotonic() if self._times else None
                    self._changed.wait(left)
                heapq.heappop(self._times)
            self._wake()
