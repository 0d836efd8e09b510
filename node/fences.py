"""Which attempts a node may still take work for.

An abort must also win against messages that are still under way, so it leaves a tombstone: the highest attempt of the
request that is over. So does work that was taken, since a node takes an attempt once. Both outlive the deadline of
their request: what a router says of a request comes in order, and a prefill node says nothing of one after its
deadline, so later no message of that attempt can be in flight.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Set

from baton.messages import AttemptId
from node.remembered import Remembered

UNDER_WAY_S = 60.0
"""By how much a tombstone outlives the deadline. A stream that carries nothing for 5 s is ended, as is one that takes
so long to be opened, so no message is under way for longer than a part of this."""

MAX_LEFT = 1_000_000
"""Tombstones, and samples stopped, that Aborts of one router may leave behind of work that was never heard of: 270
a second for an hour, 240 MB."""

_Key = bytes  # 16, of all attempts at a request, whose id may be of any length
_NONE = frozenset[int]()


class Fences:
    """The highest attempt seen or aborted of each request, until no message about it can come.

    `deadline_s` is what a message states of its request, from now on; 0: nothing. Such a tombstone is kept for twice
    `max_deadline_s`, what this node allows at most, since others may allow more; and no other for longer. Every call is
    O(1), `expire` but for what it forgets.
    """

    def __init__(self, max_deadline_s: float) -> None:
        self._max_deadline_s = max_deadline_s
        self._over = Remembered[_Key, int]()
        self._stopped: dict[AttemptId, set[int]] = {}  # samples aborted one by one
        # What Aborts have left: keys that were not heard of, with their epochs; attempts with stopped samples, by key.
        self._unheard: dict[_Key, int] = {}
        self._partly: dict[_Key, list[AttemptId]] = {}
        self._num_left = Counter[int]()  # of both, by epoch

    def __len__(self) -> int:
        return len(self._over)

    def admit(self, attempt_id: AttemptId, now: float, deadline_s: float) -> bool:
        """Whether this is news: no such or higher attempt was seen or fenced. Taking it in fences all lower ones."""
        key = _key_of(attempt_id)
        if attempt_id.attempt <= self._highest(key):
            return False
        self._over.keep(key, attempt_id.attempt, self._until(now, deadline_s))
        return True

    def last(self, attempt_id: AttemptId) -> AttemptId | None:
        """The highest attempt at the request that was seen or fenced: of all attempts, the one that may be alive."""
        attempt = self._highest(_key_of(attempt_id))
        return AttemptId(attempt_id.router_epoch, attempt_id.request_id, attempt) if attempt >= 0 else None

    def fence(self, attempt_id: AttemptId, now: float, deadline_s: float = 0.0) -> bool:
        """The attempt and all below it are over, also when never heard of. False: it was not, as too many before it
        were not, and is not remembered."""
        key = _key_of(attempt_id)
        highest = self._highest(key)
        if highest < 0 and not self._may_leave(attempt_id, 1):
            return False
        if highest < 0:
            self._unheard[key] = attempt_id.router_epoch
        if attempt_id.attempt > highest:
            self._over.keep(key, attempt_id.attempt, self._until(now, deadline_s))
        return True

    def stop_samples(
        self, attempt_id: AttemptId, samples: tuple[int, ...], now: float, deadline_s: float = 0.0
    ) -> bool:
        """These samples of the attempt are over; its other samples may go on. Does not count as seen. False: see
        `fence`."""
        key = _key_of(attempt_id)
        if attempt_id.attempt < self._highest(key):
            return True  # all of it is over
        stopped = self._stopped.get(attempt_id, set())
        if not self._may_leave(attempt_id, len(set(samples) - stopped)):
            return False
        if key not in self._over:
            self._over.keep(key, -1, self._until(now, deadline_s))
        if not stopped:
            self._stopped[attempt_id] = stopped
            self._partly.setdefault(key, []).append(attempt_id)
        stopped.update(samples)
        return True

    def stopped(self, attempt_id: AttemptId) -> Set[int]:
        return self._stopped.get(attempt_id, _NONE)

    def expire(self, now: float) -> None:
        """Forget what is older than any message under way. Call it now and then."""
        for key in self._over.expire(now):
            if (epoch := self._unheard.pop(key, None)) is not None:
                self._forget_left(epoch, 1)
            for attempt_id in self._partly.pop(key, ()):
                self._forget_left(attempt_id.router_epoch, len(self._stopped.pop(attempt_id)))

    def _highest(self, key: _Key) -> int:
        attempt = self._over.get(key)
        return -1 if attempt is None else attempt

    def _until(self, now: float, deadline_s: float) -> float:
        longest = 2 * self._max_deadline_s
        return now + (min(deadline_s, longest) if deadline_s > 0 else longest) + UNDER_WAY_S

    def _may_leave(self, attempt_id: AttemptId, num: int) -> bool:
        """Count what an Abort is about to leave, if it may."""
        if self._num_left[attempt_id.router_epoch] + num > MAX_LEFT:
            return False
        self._num_left[attempt_id.router_epoch] += num
        return True

    def _forget_left(self, epoch: int, num: int) -> None:
        self._num_left[epoch] -= num
        if not self._num_left[epoch]:
            del self._num_left[epoch]


def _key_of(attempt_id: AttemptId) -> _Key:
    name = f"{attempt_id.router_epoch}/{attempt_id.request_id}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
