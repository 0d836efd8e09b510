"""Items that wait, in order of priority and then of arrival."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Rank = tuple[int, int]
"""An item's priority, of which a lower one comes first, and its number in order of arrival."""


class WaitingQueue(Generic[T]):
    """Strict, as vLLM's priority scheduling: no item comes before one with a lower priority value, however long it has
    waited. Queues that share `serials` have ranks that can be compared. Adding and removing cost a binary search, and
    moving the pointers behind the item."""

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

    def add(self, item: T, priority: int) -> None:
        """Queue it behind all others of its priority. It must not be here already."""
        assert item not in self._ranks
        rank = self._ranks[item] = (priority, next(self._serials))
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

    def num_up_to(self, priority: int) -> int:
        """How many have this priority or a lower value: an item added with it now would come behind all of them."""
        return bisect.bisect_left(self._order, (priority + 1, -1))
