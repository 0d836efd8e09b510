"""Which attempts a node may still take work for.

An abort must also win against messages that are still under way, so it leaves a tombstone: the highest attempt of the
request that is over. Tombstones outlive the longest deadline, after which no message of that attempt can be in flight.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.messages import WorkId

Key = tuple[int, str]


class Fences:
    """The highest attempt seen or aborted for each request, for `keep_s` seconds after it was last touched."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._over: OrderedDict[Key, tuple[int, float]] = OrderedDict()  # key -> (attempt, when to forget)
        self._stopped: dict[WorkId, set[int]] = {}  # samples aborted one by one

    def __len__(self) -> int:
        return len(self._over)

    def admit(self, work: WorkId, now: float) -> bool:
        """Whether this is news: no such or higher attempt was seen or fenced. Taking it in fences all lower ones."""
        if work.attempt <= self._over.get(work.key, (-1, 0.0))[0]:
            return False
        self._touch(work.key, work.attempt, now)
        return True

    def fence(self, work: WorkId, now: float) -> None:
        """The attempt and all below it are over, also when never heard of."""
        self._touch(work.key, max(work.attempt, self._over.get(work.key, (-1, 0.0))[0]), now)

    def stop_samples(self, work: WorkId, samples: tuple[int, ...], now: float) -> None:
        """These samples of the attempt are over; its other samples may go on. Does not count as seen."""
        self._stopped.setdefault(work, set()).update(samples)
        self._touch(work.key, self._over.get(work.key, (-1, 0.0))[0], now)

    def stopped(self, work: WorkId) -> frozenset[int]:
        return frozenset(self._stopped.get(work, ()))

    def expire(self, now: float) -> None:
        """Forget what is older than any message under way. Call it now and then."""
        while self._over:
            key, (_, forget) = next(iter(self._over.items()))
            if forget > now:
                return
            del self._over[key]
            for work in [w for w in self._stopped if w.key == key]:
                del self._stopped[work]

    def _touch(self, key: Key, attempt: int, now: float) -> None:
        self._over[key] = (attempt, now + self._keep_s)
        self._over.move_to_end(key)
