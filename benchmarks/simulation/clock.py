"""Virtual time: it stands still while something happens, and jumps to whatever happens next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """What is due at one moment happens in the order in which it was scheduled."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = itertools.count()

    def now(self) -> float:
        return self._now

    def at(self, when: float, action: Callable[[], None]) -> None:
        """A time that has passed means now."""
        heapq.heappush(self._due, (max(when, self._now), next(self._serials), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self._now + seconds, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until that holds. Raises RuntimeError if nothing is left that could happen."""
        while not until():
            if not self._due:
                raise RuntimeError(f"nothing is left to happen after {self._now:.3f} s")
            self._now, _, action = heapq.heappop(self._due)
            action()
