"""The sequences that wait to run, new ones in their lanes and preempted ones, and which of them is next.

A sequence to hand off keeps its blocks until another node has room for it, however long that takes. So all sequences
for the same node form a lane, and if there are several lanes, the blocks that the admitted sequences of a lane hold
until they leave it are bounded by an equal share of the pool. A lane that has used up its share waits, and does not
keep the others waiting.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from baton.block_hash import BlockHash
from baton.waiting_queue import Rank, WaitingQueue
from engine.block_manager import BlockManager
from engine.sequence import Sequence, SequenceState

KNOWN_S = 600.0
"""How long a lane without sequences still counts after its last arrival, so that its share is free for the next one."""


@dataclass(slots=True)
class _Lane:
    """The sequences of a lane that have not run yet, and how many blocks the admitted ones hold."""

    queue: WaitingQueue[Sequence]
    last_arrival_s: float = 0.0
    num_held: int = 0


class WaitingSequences:
    """The waiting sequences, in the order in which they are due. A sequence that waits not for room, but for a block
    that is being loaded or for its matcher, is deferred: others go ahead of it. Calls cost at most O(lanes), what
    `WaitingQueue` costs, and for `first` the sequences that it skips. most_blocks: how many blocks a sequence of so
    many tokens needs."""

    def __init__(self, blocks: BlockManager, most_blocks: Callable[[int], int]) -> None:
        self._blocks = blocks
        self._most_blocks = most_blocks
        self._lanes: dict[Hashable, _Lane] = {}  # that of None: of sequences that wait for no other node
        self._serials = itertools.count()
        self._holders: dict[Sequence, int] = {}  # admitted sequences still in their lanes -> blocks
        self.num_tokens = 0
        """The tokens of prompts of which nothing is computed yet."""
        self._preempted: list[Sequence] = []  # in order of rank; if due at the same time, before those in the lanes
        # Deferred sequences of both kinds, with the hash of the block whose load they wait for; None: for the matcher.
        self._deferred: dict[Sequence, BlockHash | None] = {}
        self._short: Sequence | None = None  # there were too few blocks for it when it was its turn
        self.begins_until_s = math.inf
        """Sequences that are due later are not begun. Set by the caller while something of its own that is due then
        waits for room."""

    def __len__(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes.values()) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain(*(lane.queue for lane in self._lanes.values()), self._preempted)

    @property
    def num_deferred(self) -> int:
        """How many sequences waited for a load or their matcher, not for room, when the last step was scheduled."""
        return len(self._deferred)

    def has_preempted(self, due_s: float) -> bool:
        """Whether a preempted sequence that is due at that time or earlier waits for blocks."""
        return self._num_preempted_up_to(due_s) > 0

    def lacks_blocks(self, due_s: float) -> bool:
        """Whether a sequence that is due at that time or earlier waits for blocks, preempted or not: what is due then
        should be promised none meanwhile, or one that needs many would never get them."""
        is_short = self._short is not None and self._short.due_s <= due_s
        return is_short or self.has_preempted(due_s)

    def num_up_to(self, due_s: float) -> int:
        """How many are due at that time or earlier, preempted ones included."""
        return sum(lane.queue.num_up_to(due_s) for lane in self._lanes.values()) + self._num_preempted_up_to(due_s)

    def _num_preempted_up_to(self, due_s: float) -> int:
        return bisect.bisect(self._preempted, due_s, key=_due_s)

    # ---- in and out ----

    def add(self, seq: Sequence) -> None:
        """Queue it in its lane, behind all that are due no later."""
        lane = self._lanes.setdefault(seq.lane, _Lane(WaitingQueue(self._serials)))
        lane.queue.add(seq, seq.due_s)
        lane.last_arrival_s = seq.arrived_s
        self.num_tokens += seq.num_tokens
        known_s = seq.arrived_s - KNOWN_S
        self._lanes = {
            name: known
            for name, known in self._lanes.items()
            if known.queue or known.num_held or known.last_arrival_s > known_s
        }

    def add_preempted(self, seq: Sequence) -> None:
        """Queue a preempted sequence, whose KV is gone, where it is due, before sequences that are due at the same time
        and have not run yet."""
        seq.rewind(0)
        seq.num_preemptions += 1
        bisect.insort(self._preempted, seq, key=rank_of)

    def remove(self, seq: Sequence) -> None:
        """Take it out, if it is here."""
        lane = self._lanes.get(seq.lane)
        if lane is not None and lane.queue.remove(seq):
            self.num_tokens -= seq.num_tokens
        self._deferred.pop(seq, None)
        if seq is self._short:
            self._short = None
        if seq in self._preempted:
            self._preempted.remove(seq)

    def hold_lane(self, seq: Sequence) -> None:
        """Count an admitted sequence's blocks, which are for all of its tokens, against its lane's share."""
        if seq.lane is not None:
            self._holders[seq] = num_blocks = self._most_blocks(seq.num_tokens)
            self._lanes[seq.lane].num_held += num_blocks

    def leave_lane(self, seq: Sequence) -> None:
        """Stop counting the sequence's blocks: the other node has room for it, or it has ended. Idempotent."""
        if num_held := self._holders.pop(seq, 0):
            self._lanes[seq.lane].num_held -= num_held

    # ---- whose turn it is ----

    def first(self) -> Sequence | None:
        """The next sequence to admit, among those that are not deferred. None: there is none, its lane has no room, or
        it is due after `begins_until_s`."""
        preempted = next((seq for seq in self._preempted if seq not in self._deferred), None)
        fresh = self._first_fresh()
        if fresh is not None and fresh.due_s > self.begins_until_s:
            fresh = None
        if preempted is None or fresh is None:
            return preempted or fresh
        return preempted if preempted.due_s <= fresh.due_s else fresh

    def _first_fresh(self) -> Sequence | None:
        """Of the first sequence of each lane that has room for it, the one that is due first. A lane that holds no
        blocks has room for one sequence, however long."""
        heads = list[tuple[Rank, Sequence]]()
        num_lanes = len(self._lanes.keys() - {None})
        share = self._blocks.num_total // num_lanes if num_lanes > 1 else math.inf
        for lane in self._lanes.values():
            head = next((seq for seq in lane.queue if seq not in self._deferred), None)
            if head is None:
                continue
            if not lane.num_held or lane.num_held + self._most_blocks(head.num_tokens) <= share:
                heads.append((lane.queue.rank_of(head), head))
        return min(heads)[1] if heads else None

    def defer(self, seq: Sequence, wanted: BlockHash | None) -> None:
        """Let others go ahead of the sequence until the load of the block `wanted` has ended or failed; None: until the
        sequence's matcher is ready."""
        self._deferred[seq] = wanted
        if seq is self._short:
            self._short = None

    def note_short(self, seq: Sequence) -> None:
        """There are too few blocks for the sequence, whose turn it is."""
        self._short = seq

    def end_deferrals(self) -> None:
        """End the deferral of sequences whose load has ended or failed, or whose matcher is ready."""
        if self._deferred:
            self._deferred = {seq: wanted for seq, wanted in self._deferred.items() if self._still_waits(seq, wanted)}

    def _still_waits(self, seq: Sequence, wanted: BlockHash | None) -> bool:
        return seq.awaits_matcher if wanted is None else self._blocks.is_loading(wanted)

    def check_integrity(self) -> None:
        """Assert that all sequences here are waiting, hold no blocks, and are counted correctly."""
        for seq in self:
            assert seq.state is SequenceState.WAITING
            assert not seq.in_flight
            assert not seq.block_table, f"{seq.attempt_id} waits and holds blocks"
            assert not seq.num_claimed_blocks, f"{seq.attempt_id} waits and claims blocks"
        assert self._deferred.keys() <= {*self}, "a sequence is deferred that does not wait"
        assert self._short is None or self._short in {*self}, "a sequence that does not wait lacks blocks"
        fresh = itertools.chain.from_iterable(lane.queue for lane in self._lanes.values())
        assert self.num_tokens == sum(seq.num_tokens for seq in fresh), "waiting tokens are miscounted"


def rank_of(seq: Sequence) -> tuple[float, int]:
    return seq.rank


def _due_s(seq: Sequence) -> float:
    return seq.due_s
