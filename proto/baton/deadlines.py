"""Tracks many deadlines and finds the next one without scanning them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_COMPACTED = 64
"""A shorter heap is not worth rebuilding."""


def earliest(*whens: float | None) -> float | None:
    """The first of these times. None: no time."""
    return min((when for when in whens if when is not None), default=None)


class Deadlines(Generic[K]):
    """One deadline for each key, in seconds of the caller's clock. Every call costs O(log n) amortized, `next` O(1).

    A heap of (when, serial) with lazy deletion: entries that were discarded or replaced stay until they reach the top,
    or until more than half of the heap is stale and it is rebuilt.
    """

    def __init__(self) -> None:
        self._live: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serials = itertools.count()  # so that keys are never compared

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def set(self, key: K, when: float) -> None:
        """Set the key's deadline, replacing any previous one."""
        self._live[key] = entry = (when, next(self._serials))
        heapq.heappush(self._heap, (*entry, key))
        self._clean()

    def discard(self, key: K) -> None:
        """Remove the key's deadline, if it has one."""
        if self._live.pop(key, None) is not None:
            self._clean()

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadlines are at or before `now`, earliest first."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(key := self._heap[0][2])
            del self._live[key]
            self._clean()
        return due

    def _clean(self) -> None:
        """Keep a live entry on top, and a heap above the minimum no longer than twice the number of live entries."""
        heap, live = self._heap, self._live
        if len(heap) > max(_MIN_COMPACTED, 2 * len(live)):
            self._heap = [(*entry, key) for key, entry in live.items()]
            heapq.heapify(self._heap)
            return
        while heap and live.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
