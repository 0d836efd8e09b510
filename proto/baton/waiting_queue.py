"""Items that wait, in the order in which they are due (`baton.priority`)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Rank = tuple[float, int]
"""When an item is due, and its number in order of arrival."""


class WaitingQueue(Generic[T]):
    """The item that is due first is first; of those due at the same time, the one that was added first. Queues that
    share `serials` have ranks that can be compared. Adding and removing cost a binary search, and moving the pointers
    behind the item."""

    def __init__(self, serials: Iterator[int] | None = None) -> None:
        self._serials = itertools.count() if serials is None else serials
        self._ranks: dict[T, Rank] = {}
        self._order: list[Rank] = []
        self._items: list[T] = []  # beside `_order`

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._ranks

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T, due_s: float) -> None:
        """Queue it behind all that are due no later. It must not be here already."""
        assert item not in self._ranks
        rank = self._ranks[item] = (due_s, next(self._serials))
        at = bisect.bisect(self._order, rank)
        self._order.insert(at, rank)
        self._items.insert(at, item)

    def remove(self, item: T) -> bool:
        """Take it out. False: it was not here."""
        rank = self._ranks.pop(item, None)
        if rank is None:
            return False
        at = bisect.bisect_left(self._order, rank)
        del self._order[at], self._items[at]
        return True

    def rank_of(self, item: T) -> Rank:
        return self._ranks[item]

    def num_up_to(self, due_s: float) -> int:
        """How many are due at that time or earlier: an item added with it now would come behind all of them."""
        return bisect.bisect_right(self._order, (due_s, math.inf))
