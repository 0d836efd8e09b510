"""The sequences that wait to run, new ones in their lanes and preempted ones, and which of them is next."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator

from baton.block_hash import BlockHash
from engine.block_manager import BlockManager
from engine.lanes import Lanes
from engine.sequence import Sequence, SequenceState


class WaitingSequences:
    """The waiting sequences, in the order in which they are due. A sequence that waits not for room, but for a block
    that is being loaded or for its matcher, is deferred: others go ahead of it."""

    def __init__(self, blocks: BlockManager, most_blocks: Callable[[int], int]) -> None:
        self._blocks = blocks
        self._lanes = Lanes(blocks.num_total, most_blocks)  # those that have not run yet
        self._preempted: list[Sequence] = []  # in order of rank; if due at the same time, before those in the lanes
        # Deferred sequences of both kinds, with the hash of the block whose load they wait for; None: for the matcher.
        self._deferred: dict[Sequence, BlockHash | None] = {}
        self._short: Sequence | None = None  # there were too few blocks for it when it was its turn
        self.begins_until_s = math.inf
        """Sequences that are due later are not begun. Set by the caller while something of its own that is due then
        waits for room."""

    def __len__(self) -> int:
        return len(self._lanes) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain(self._lanes, self._preempted)

    @property
    def num_tokens(self) -> int:
        """The tokens of prompts of which nothing is computed yet."""
        return self._lanes.num_waiting_tokens

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
        return self._lanes.num_up_to(due_s) + self._num_preempted_up_to(due_s)

    def _num_preempted_up_to(self, due_s: float) -> int:
        return bisect.bisect(self._preempted, due_s, key=_due_s)

    # ---- in and out ----

    def add(self, seq: Sequence) -> None:
        """Queue it behind all that are due no later."""
        self._lanes.add(seq)

    def add_preempted(self, seq: Sequence) -> None:
        """Queue a preempted sequence, whose KV is gone, where it is due, before sequences that are due at the same time
        and have not run yet."""
        seq.rewind(0)
        seq.num_preemptions += 1
        bisect.insort(self._preempted, seq, key=rank_of)

    def remove(self, seq: Sequence) -> None:
        """Take it out, if it is here."""
        self._lanes.remove(seq)
        self._deferred.pop(seq, None)
        if seq is self._short:
            self._short = None
        if seq in self._preempted:
            self._preempted.remove(seq)

    def hold_lane(self, seq: Sequence) -> None:
        """Count an admitted sequence's blocks against its lane's share."""
        self._lanes.hold(seq)

    def leave_lane(self, seq: Sequence) -> None:
        """Stop counting the sequence's blocks against its lane's share: the other node has room for it, or it ended."""
        self._lanes.leave(seq)

    # ---- whose turn it is ----

    def first(self) -> Sequence | None:
        """The next sequence to admit, among those that are not deferred. None: there is none, its lane has no room, or
        it is due after `begins_until_s`."""
        preempted = next((seq for seq in self._preempted if seq not in self._deferred), None)
        fresh = self._lanes.first(without=self._deferred)
        if fresh is not None and fresh.due_s > self.begins_until_s:
            fresh = None
        if preempted is None or fresh is None:
            return preempted or fresh
        return preempted if preempted.due_s <= fresh.due_s else fresh

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
        assert self.num_tokens == sum(seq.num_tokens for seq in self._lanes), "waiting tokens are miscounted"


def rank_of(seq: Sequence) -> tuple[float, int]:
    return seq.rank


def _due_s(seq: Sequence) -> float:
    return seq.due_s
