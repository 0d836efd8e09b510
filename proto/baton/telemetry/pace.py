"""Limits each client's request rate: a burst, then evenly spaced requests, so that a client in a loop costs little."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_HOSTS = 1024


class Pace:
    """Allows `burst` requests from a host at once, then `per_s` a second (generic cell rate algorithm, ITU-T I.371).

    Remembers the last MAX_HOSTS hosts.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_s = 1 / per_s
        self._slack_s = burst / per_s
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()

    def take(self, host: str, patience_s: float) -> float | None:
        """Seconds to wait before answering the host's request. None if that exceeds `patience_s`; the request is then
        not counted."""
        now = self._clock()
        due = max(now, self._next.get(host, now)) + self._step_s
        wait_s = max(0.0, due - self._slack_s - now)
        if wait_s > patience_s:
            return None
        self._next[host] = due
        self._next.move_to_end(host)
        if len(self._next) > MAX_HOSTS:
            self._next.popitem(last=False)
        return wait_s
