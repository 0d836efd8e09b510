"""Which waiting sequence is next, and how much of the pool sequences may hold while they wait for another node.

A sequence to hand off keeps its blocks until another node has room for it, however long that takes. So all sequences
for the same node form a lane, and if there are several lanes, the blocks that the admitted sequences of a lane hold
until they `leave` it are bounded by an equal share of the pool. A lane that has used up its share waits, and does not
keep the others waiting.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator

from baton.waiting_queue import Rank, WaitingQueue
from engine.sequence import Sequence

KNOWN_S = 600.0
"""How long a lane without sequences still counts after its last arrival, so that its share is free for the next one."""

Lane = Hashable


class Lanes:
    """The sequences that have not run yet, in the order in which they are due, and the blocks that each lane holds.
    Every call costs at most O(lanes), what `WaitingQueue` costs, and for `first` the sequences that it skips; `None` is
    the lane of sequences that wait for no other node. most_blocks: how many blocks a sequence of so many tokens
    needs."""

    def __init__(self, num_blocks: int, most_blocks: Callable[[int], int]) -> None:
        self._num_blocks = num_blocks
        self._most_blocks = most_blocks
        self._queues: dict[Lane, WaitingQueue[Sequence]] = {}  # no queue is empty
        self._serials = itertools.count()
        self._num_waiting = 0
        self.num_waiting_tokens = 0
        """The tokens of all waiting sequences."""
        self._holders: dict[Sequence, int] = {}  # admitted sequences still in their lanes -> blocks
        self._num_held = Counter[Lane]()
        self._last_arrival: OrderedDict[Lane, float] = OrderedDict()  # of known lanes, oldest first

    def __len__(self) -> int:
        """How many sequences wait."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(self._queues.values())

    def add(self, seq: Sequence) -> None:
        """Queue the sequence behind all that are due no later."""
        self._queues.setdefault(seq.lane, WaitingQueue(self._serials)).add(seq, seq.due_s)
        self._num_waiting += 1
        self.num_waiting_tokens += seq.num_tokens
        if seq.lane is not None:
            self._last_arrival[seq.lane] = seq.arrived_s
            self._last_arrival.move_to_end(seq.lane)
            self._forget_old(seq.arrived_s)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of its queue, if it is in one."""
        queue = self._queues.get(seq.lane)
        if queue and queue.remove(seq):
            self._num_waiting -= 1
            self.num_waiting_tokens -= seq.num_tokens
            if not queue:
                del self._queues[seq.lane]

    def first(self, without: Container[Sequence] = ()) -> Sequence | None:
        """The next sequence to admit: of the first sequence of each lane that has room for it, the one that is due
        first. Sequences in `without` are skipped. None: there is none."""
        heads = list[tuple[Rank, Sequence]]()
        for queue in self._queues.values():
            head = next((seq for seq in queue if seq not in without), None)
            if head is not None and self._has_room(head):
                heads.append((queue.rank_of(head), head))
        return min(heads)[1] if heads else None

    def num_up_to(self, due_s: float) -> int:
        """How many waiting sequences are due at that time or earlier."""
        return sum(queue.num_up_to(due_s) for queue in self._queues.values())

    def hold(self, seq: Sequence) -> None:
        """Count an admitted sequence's blocks, which are for all of its tokens, against its lane's share."""
        if seq.lane is not None:
            self._holders[seq] = num_blocks = self._most_blocks(seq.num_tokens)
            self._num_held[seq.lane] += num_blocks

    def leave(self, seq: Sequence) -> None:
        """Stop counting the sequence's blocks: the other node has room for it, or it has ended. Idempotent."""
        if num_held := self._holders.pop(seq, 0):
            self._num_held[seq.lane] -= num_held

    def _has_room(self, seq: Sequence) -> bool:
        """A lane that holds no blocks always has room for one sequence, however long."""
        held = self._num_held[seq.lane]
        if not held or len(self._last_arrival) < 2:
            return True
        return held + self._most_blocks(seq.num_tokens) <= self._num_blocks // len(self._last_arrival)

    def _forget_old(self, now: float) -> None:
        while True:
            lane, arrived_s = next(iter(self._last_arrival.items()))
            if arrived_s > now - KNOWN_S or lane in self._queues or self._num_held[lane]:
                return
            del self._last_arrival[lane], self._num_held[lane]
