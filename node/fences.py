"""Which attempts a node may still take work for.

An abort must also win against messages that are still in flight, so it leaves a tombstone: the highest attempt of the
request that is over. Accepted work leaves one too, since a node takes each attempt once. Both outlive the request's
deadline: a router's messages about a request arrive in order, and a prefill node sends none after its deadline, so no
later message of that attempt can be in flight.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Set

from baton.messages import AttemptId
from baton.wire.limits import MAX_MOVES
from node.expiring_dict import ExpiringDict

UNDER_WAY_S = 60.0
"""By how much a tombstone outlives the deadline. A stream ends if it is silent for 5 s or takes 5 s to open, so
messages are in flight for only a fraction of this time."""

MAX_LEFT = 1_000_000
"""Tombstones and stopped samples that one router's Aborts of unknown work may leave behind: 270 a second for an hour,
240 MB."""

_Key = bytes  # 16 bytes, the same for all attempts at a request, whose id may have any length
_NONE = frozenset[int]()


class Fences:
    """The highest attempt seen or aborted of each request, until no message about it can arrive.

    `deadline_s` is the time that the request has left, as stated by a message; 0: not stated. Then the tombstone is
    kept for twice `max_deadline_s`, this node's maximum, since other nodes may allow more; none is kept for longer.
    Every call is O(1), `expire` plus the number of entries it drops.
    """

    def __init__(self, max_deadline_s: float) -> None:
        self._max_deadline_s = max_deadline_s
        self._over = ExpiringDict[_Key, int]()
        self._stopped: dict[AttemptId, set[int]] = {}  # samples aborted one by one
        # What Aborts have left behind: keys that were unknown, with their epochs; attempts with stopped samples, by
        # key.
        self._unheard: dict[_Key, int] = {}
        self._partly: dict[_Key, list[AttemptId]] = {}
        self._num_left = Counter[int]()  # the number of both, by epoch

    def __len__(self) -> int:
        return len(self._over)

    def admit(self, attempt_id: AttemptId, now: float, deadline_s: float, move: int = 0) -> bool:
        """Whether the attempt is new: neither it nor a higher one was seen or fenced. If so, fences all lower ones. An
        attempt that moves between decode nodes is new again with a higher `move`."""
        key, number = _key_of(attempt_id), attempt_id.attempt * MAX_MOVES + move
        if number <= self._number(key):
            return False
        self._over.keep(key, number, self._until(now, deadline_s))
        return True

    def last(self, attempt_id: AttemptId) -> AttemptId | None:
        """The highest attempt at the request that was seen or fenced: the only one that may be alive."""
        attempt = self._highest(_key_of(attempt_id))
        return AttemptId(attempt_id.router_epoch, attempt_id.request_id, attempt) if attempt >= 0 else None

    def fence(self, attempt_id: AttemptId, now: float, deadline_s: float = 0.0) -> bool:
        """End the attempt and all below it, whether they are known here or not. False: the attempt is unknown and is
        not remembered, since the router has sent too many of these."""
        key = _key_of(attempt_id)
        highest = self._highest(key)
        if highest < 0 and not self._may_leave(attempt_id, 1):
            return False
        if highest < 0:
            self._unheard[key] = attempt_id.router_epoch
        last_move = (attempt_id.attempt + 1) * MAX_MOVES - 1
        if last_move > self._number(key):  # an attempt that is known already has its deadline
            until = self._until(now, deadline_s) if attempt_id.attempt > highest else now
            self._over.keep(key, last_move, until)
        return True

    def stop_samples(
        self, attempt_id: AttemptId, samples: tuple[int, ...], now: float, deadline_s: float = 0.0
    ) -> bool:
        """End these samples of the attempt; the others may go on. Does not count as seen. False: see `fence`."""
        key = _key_of(attempt_id)
        if attempt_id.attempt < self._highest(key):
            return True  # the whole attempt is over
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
        """Forget entries that no message in flight can refer to. Call it now and then."""
        for key in self._over.expire(now):
            if (epoch := self._unheard.pop(key, None)) is not None:
                self._forget_left(epoch, 1)
            for attempt_id in self._partly.pop(key, ()):
                self._forget_left(attempt_id.router_epoch, len(self._stopped.pop(attempt_id)))

    def _highest(self, key: _Key) -> int:
        """The highest attempt that was seen or fenced; -1: none."""
        return self._number(key) // MAX_MOVES

    def _number(self, key: _Key) -> int:
        """Attempt and move, as one number."""
        number = self._over.get(key)
        return -1 if number is None else number

    def _until(self, now: float, deadline_s: float) -> float:
        longest = 2 * self._max_deadline_s
        return now + (min(deadline_s, longest) if deadline_s > 0 else longest) + UNDER_WAY_S

    def _may_leave(self, attempt_id: AttemptId, num: int) -> bool:
        """Count what an Abort is about to leave behind. False: not counted, the router is at its limit."""
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
