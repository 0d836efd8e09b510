"""Limits how fast each client may ask: a burst at once, then in even steps, so that a client in a loop costs little."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_HOSTS = 1024


class Pace:
    """Allows `burst` requests of a host at once, then `per_s` a second (generic cell rate algorithm, ITU-T I.371).

    Remembers the last MAX_HOSTS hosts.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_s = 1 / per_s
        self._slack_s = burst / per_s
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()

    def take(self, host: str, patience_s: float) -> float | None:
        """Seconds to wait before the host's request may be answered. None: that is more than `patience_s`, and the
        request does not count."""
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
