"""A running request on its way to another decode node."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton.handoff_messages import Commit, Reserve
from baton.messages import HandedOff, Sample
from baton.table_shape import TableShape
from engine.config import EngineConfig
from engine.sequence import Sequence, SequenceState
from kv_transfer.parts import PlannedPart
from node.handoffs.sending import KvSending

SPARE_TOKENS = 64
SPARE_SHARE = 1 / 32
"""The Reserve asks for room for this many more tokens than there are, and for this share of them in addition: they are
generated while the target has no room yet or the KV is being copied. 64 steps of an 8B model on an H200 take a third of
a second."""


class MigrationState(enum.Enum):
    """The request goes on here while it is copied; from STOPPING on it waits until one of the two nodes goes on with
    it.

    COPYING --what is computed has left--> STOPPING --its steps retired: Commit--> COMMITTED --all landed--> (HandedOff)
       |                                      |                                       |
       +---- refused, peer lost: Stayed ------+                                       +-- refused: Stayed
       +---- too slow, preempted: Stayed -----+                                       +-- peer lost, no answer: End
       `---- abort, deadline, last token -----+---------------------------------------'
    """

    COPYING = "copying"
    STOPPING = "stopping"
    COMMITTED = "committed"


@dataclass(slots=True, kw_only=True, eq=False)
class Migration(KvSending):
    """`move`: the number in the Migrate. `stopped`: when the request was taken out of further steps."""

    move: int
    state: MigrationState = MigrationState.COPYING
    stopped: float = 0.0

    def blocks_of(self, part: PlannedPart) -> Seq[int]:
        """For spare tokens without a block yet, a part carries the last block instead, and for blocks that have fallen
        behind their window the null block: nobody reads either."""
        table = self.sequence.block_table
        return [table[min(entry, len(table) - 1)] for entry in self.entries_of(part)]

    def _is_computed(self, part: PlannedPart, shape: TableShape) -> bool:
        """Whether the part's KV is computed and will not change."""
        if self.sequence.state is SequenceState.PARKED:
            return True
        is_full = self.sequence.num_computed_tokens >= self._end_token(part, shape)
        return self.sequence.state is SequenceState.RUNNING and is_full

    def only_rest_is_left(self, shape: TableShape) -> bool:
        """Whether the only thing that keeps the next part from leaving is that its tokens are not computed yet."""
        return self.next_part < min(self.credits, len(self.parts)) and self.ready_part(shape, 0) is None

    @property
    def has_outgrown_target(self) -> bool:
        """Whether the next token would have no room at the target."""
        return self.sequence.num_tokens + self.sequence.num_pending_tokens > self.num_tokens

    def reserve(self, config: EngineConfig, now: float) -> Reserve | None:
        """The Reserve that asks for room. None: the request is about to end."""
        assert self.target is not None
        sequence, num_computed = self.sequence, self.sequence.num_computed_tokens
        most = min(len(sequence.prompt_tokens) + sequence.sampling.max_tokens, config.max_model_len)
        num_known = sequence.num_tokens - 1  # some may have to be computed again, after a preemption
        num_tokens = min(num_known + SPARE_TOKENS + int(num_known * SPARE_SHARE), most - 1)
        if num_tokens <= num_known:
            return None
        return Reserve(
            attempt_id=self.attempt_id,
            target_incarnation=self.target.incarnation,
            num_tokens=num_tokens,
            block_hashes=tuple(sequence.block_hashes(num_computed // config.block_size, config.block_size)),
            num_samples=1,
            deadline_s=self.deadline - now,
            max_total_tokens=most,
            priority=sequence.priority,
            age_s=now - sequence.arrived_s + sequence.age_s,
            move=self.move,
            num_spare_tokens=num_tokens - num_computed,
            goes_on=True,
        )

    def commit(self, now: float, age_s: float) -> Commit:
        """The Commit, which gives the request to the target, `age_s` after it stopped."""
        sequence = self.sequence
        assert self.target is not None
        assert self.grant is not None
        return Commit(
            lease=self.grant.lease,
            attempt_id=self.attempt_id,
            target_incarnation=self.target.incarnation,
            prompt_tokens=sequence.prompt_tokens,
            samples=(Sample(sequence.samples[0], sequence.output_tokens),),
            sampling=sequence.sampling,
            deadline_s=self.deadline - now,
            cache_salt=sequence.cache_salt,
            age_s=age_s,
        )

    def handed_off(self) -> HandedOff:
        """The final update: its times count from when the request stopped."""
        gathered, sent = max(self.stopped, self.gathered), max(self.stopped, self.sent)
        return HandedOff(0.0, gathered - self.stopped, sent - gathered)


def is_movable(sequence: Sequence) -> bool:
    """Whether it generates, is the only sample of its sequence, and has KV of its whole prompt."""
    is_alone = sequence.generates and sequence.state is SequenceState.RUNNING
    return is_alone and sequence.num_output_tokens > 0 and sequence.num_computed_tokens >= len(sequence.prompt_tokens)
