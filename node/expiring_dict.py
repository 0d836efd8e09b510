"""What a node remembers of requests that are over, for as long as a message about them may arrive."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringDict(Generic[K, V]):
    """A dict whose entries expire, each within a second after the time set for it.

    Each key is filed once, by the second in which it expires. So an entry costs its place in the dict and a pointer,
    every operation is O(1) amortized, and finding the expired entries is free.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._by_second: dict[int, list[K]] = {}
        self._seconds: list[int] = []  # the keys of `_by_second`, as a heap
        self._longer: dict[K, int] = {}  # when keys that were kept again expire

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def keep(self, key: K, value: V, until: float) -> None:
        """Keep the key until then, in seconds of the caller's clock, or longer if an earlier call said so."""
        second = math.ceil(until)
        if key in self._values:
            self._longer[key] = max(second, self._longer.get(key, second))
        else:
            self._file(key, second)
        self._values[key] = value

    def expire(self, now: float) -> list[K]:
        """Drop expired entries and return their keys."""
        gone: list[K] = []
        while self._seconds and self._seconds[0] <= now:
            second = heapq.heappop(self._seconds)
            for key in self._by_second.pop(second):
                if (longer := self._longer.pop(key, second)) > second:
                    self._file(key, longer)
                else:
                    del self._values[key]
                    gone.append(key)
        return gone

    def _file(self, key: K, second: int) -> None:
        if second not in self._by_second:
            self._by_second[second] = []
            heapq.heappush(self._seconds, second)
        self._by_second[second].append(key)
