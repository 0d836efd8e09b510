"""What a thread sleeps on until other threads have work for it."""

from __future__ import annotations

import queue


class Wakeup:
    """Like `threading.Event`, for a single waiting thread: it wakes in two thirds of the time (23 us instead of 32,
    with one idle core), since waiting is a single call into the interpreter and takes no lock afterwards.

    `set` may be called on any thread. The waiting thread calls `clear`, looks for work, then calls `wait`: a `set`
    after `clear` ends the wait.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self._calls.empty():  # otherwise the waiting thread has not looked yet, and will find this work too
            self._calls.put(None)

    def clear(self) -> None:
        while not self._calls.empty():
            self._calls.get_nowait()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for `set`, at most `timeout_s` (None: for ever), and clear it. False: timed out."""
        try:
            self._calls.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True
