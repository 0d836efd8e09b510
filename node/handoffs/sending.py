"""A sequence's KV on its way from this node to a decode node, and this node's view of that decode node."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.handoff_messages import Grant
from baton.messages import AttemptId, DecodeTarget
from baton.table_shape import TableShape
from engine.sequence import Sequence
from kv_transfer.parts import PlannedPart


@dataclass(slots=True, kw_only=True, eq=False)
class KvSending:
    """`parts` are known from the grant on; the decode node derives them from the same numbers. The blocks from
    `grouped_from_block` on travel in `layer_groups` groups of layers. The Reserve asked for room for `num_tokens`, of
    which the last `num_spare_tokens` need not come, and named the first `num_named_blocks` full blocks by hash.
    `entries`: which entries of the block table the parts carry, in order."""

    attempt_id: AttemptId
    sequence: Sequence
    target: DecodeTarget | None
    deadline: float
    reserved: bool = False  # a Reserve was sent, so an end without handoff needs a Release
    num_tokens: int = 0
    num_spare_tokens: int = 0
    num_named_blocks: int = 0
    grouped_from_block: int = 0
    layer_groups: int = 1
    grant: Grant | None = None
    parts: tuple[PlannedPart, ...] = ()
    entries: Seq[int] = ()
    credits: int = 0
    next_part: int = 0  # the parts before it are gathered, or their gather is queued
    next_part_at: float = 0.0  # when the next part may leave
    spread_until: float = 0.0  # when all parts that are computed now should have left
    num_computed: int = 0  # how many parts had all of their blocks computed when a part last left
    num_sent: int = 0  # how many parts have left
    granted: float = 0.0  # when the grant came
    first_ready: float = 0.0  # when the first part was in its slot
    gathered: float = 0.0  # when the last sent part was in its slot
    sent: float = 0.0  # when the last sent part had left
    accepted: bool = False  # the decode node accepted the Commit
    landed: bool = False  # the decode node has said that all parts are there
    closed: bool = False  # the decode node has ended the lease: no credit follows

    def goes_to(self, peer: DecodePeer) -> bool:
        """Compared by incarnation: routers may know the peer by different addresses."""
        return self.target is not None and self.target.incarnation == peer.target.incarnation

    @property
    def all_gathered(self) -> bool:
        return self.grant is not None and self.next_part == len(self.parts)

    @property
    def all_sent(self) -> bool:
        return self.grant is not None and self.num_sent == len(self.parts)

    def spread(self, now: float, seconds: float) -> None:
        """Have the parts that are computed leave evenly over this many seconds from now on; 0: at once, even in a turn
        that began before `now`."""
        if seconds:
            self.spread_until = now + seconds
        else:
            self.spread_until = self.next_part_at = 0.0

    def part_leaves(self, now: float, shape: TableShape) -> None:
        """The next part is gathered. The one after it leaves when an equal share of the time until `spread_until` has
        passed, if it is computed. shape: of the block table."""
        self.next_part += 1
        while self.num_computed < len(self.parts) and self._is_computed(self.parts[self.num_computed], shape):
            self.num_computed += 1
        num_left = self.num_computed - self.next_part
        self.next_part_at = now + max(0.0, self.spread_until - now) / num_left if num_left > 0 else now

    def is_put_off(self, now: float) -> bool:
        """Whether the next part may not leave yet."""
        return now < self.next_part_at

    def part_sent(self, now: float, flight_s: float) -> None:
        """A part has left, `flight_s` after it was in its slot or after its stores into D's slot began."""
        self.num_sent += 1
        ready = now - flight_s
        self.first_ready = min(self.first_ready, ready) if self.num_sent > 1 else ready
        self.gathered, self.sent = max(self.gathered, ready), now

    def ready_part(self, shape: TableShape, num_layers: int) -> PlannedPart | None:
        """The next part, if D has a slot for it and its KV is computed: either all layers of its blocks are, or
        `num_layers`, the number of computed layers of all blocks, includes its layers. shape: of the block table."""
        if self.next_part >= min(self.credits, len(self.parts)):
            return None
        part = self.parts[self.next_part]
        return part if self._is_computed(part, shape) or part.end_layer <= num_layers else None

    def entries_of(self, part: PlannedPart) -> Seq[int]:
        """The entries of the block table that the part carries."""
        return self.entries[part.first : part.first + part.num_blocks]

    def blocks_of(self, part: PlannedPart) -> Seq[int]:
        """The blocks here that the part carries."""
        table = self.sequence.block_table
        return [table[entry] for entry in self.entries_of(part)]

    def _is_computed(self, part: PlannedPart, shape: TableShape) -> bool:
        """Whether the KV of all tokens in the part's blocks exists."""
        sequence = self.sequence
        return sequence.num_computed_tokens >= min(self._end_token(part, shape), sequence.num_tokens)

    def _end_token(self, part: PlannedPart, shape: TableShape) -> int:
        """The first token after its last block, since parts carry columns in order."""
        return (self.entries_of(part)[-1] // shape.width + 1) * shape.block_size


@dataclass(slots=True)
class Drain:
    """A dead lease with parts for which D has posted receives: each is sent as a header without blocks, because a
    posted receive is never cancelled. `closed`: D has ended the lease, so no credit can follow."""

    attempt_id: AttemptId
    next_part: int
    credits: int
    num_parts: int
    closed: bool = False

    @property
    def over(self) -> bool:
        return self.closed and self.next_part >= self.credits


@dataclass(slots=True)
class DecodePeer:
    """This node's view of a decode node, over one stream. Lease numbers only increase, so repeats and leases of earlier
    streams can be recognized."""

    target: DecodeTarget
    lost: bool = False  # its transport is gone, and its stream is about to be closed
    first_lease: int = 0  # 0: none yet
    last_lease: int = 0
    leases: dict[int, KvSending] = field(default_factory=dict)
    drains: dict[int, Drain] = field(default_factory=dict)
    drained: dict[AttemptId, set[int]] = field(default_factory=dict)  # the leases in `drains`, by attempt

    def forget_drain(self, lease: int) -> None:
        """Forget a drain that has no credits left and can get no more."""
        attempt_id = self.drains.pop(lease).attempt_id
        leases = self.drained[attempt_id]
        leases.discard(lease)
        if not leases:
            del self.drained[attempt_id]
