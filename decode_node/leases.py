"""A decode node's leases, and the Reserves that wait for one."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.handoff_messages import Commit, Reserve
from baton.messages import Adopted
from baton.priority import due_s
from engine.beams import BeamGroup
from engine.logits_processor import LogitsProcessorChain
from engine.sequence import Sequence
from kv_transfer.copies import Mark
from kv_transfer.parts import PlannedPart

LONG_BLOCKS = 512
"""A prompt with more blocks is long: it comes in many parts, and the threads that receive them compete with the
engine's thread for the interpreter."""


def is_long(num_blocks: int) -> bool:
    """Whether granting or adopting a prompt with this many blocks delays the rest of a turn of the engine's thread."""
    return num_blocks > LONG_BLOCKS


class LeaseState(enum.Enum):
    """A lease from Grant to its end.

        GRANTED --Commit--> COMMITTED --all parts landed--> (gone: Adopted, the engine owns the blocks)
           |                    |
           `--------------------+--- Release, Abort, deadline, peer or router lost: blocks are freed at once;
                                     slots when their parts have arrived or failed

    All parts may land before the Commit. With both the peer is no longer needed, though the engine may adopt the
    request only in a later turn. The network never writes to a pool block, so a lease can end at once in any
    state: from `KvReceiver.withdraw` on, parts that arrive for it stay in their slots.
    """

    GRANTED = "granted"
    COMMITTED = "committed"


@dataclass(slots=True)
class Waiting:
    """A Reserve in the queue. `since_s`: when its request came to the router, by this node's clock. `num_blocks`: how
    many its table has, including those that are here already."""

    reserve: Reserve
    peer: str
    deadline: float
    since_s: float
    num_blocks: int

    @property
    def due_s(self) -> float:
        """Its place in the queue."""
        return due_s(self.reserve.priority, self.since_s)

    @property
    def is_long(self) -> bool:
        return is_long(self.num_blocks)


@dataclass(frozen=True, slots=True)
class Extras:
    """What the sequences of a committed request need beside its parameters, and what is made from these parameters."""

    processors: LogitsProcessorChain | None = None
    beams: BeamGroup[Sequence] | None = None


@dataclass(slots=True)
class Lease:
    """Room for one request's KV. `table` has the blocks of the prefix that was found here, those to fill, and those
    that the first step writes to; `spares` has the blocks that the first step of further samples writes to. The lease
    owns them until adoption or its end. `num_cached_tokens`: tokens of the prompt whose KV was here already. `parts`:
    what the prefill node sends, to fill the table's `entries`; `marks`: for each rank, the work that was queued before
    the grant and may still use these blocks. `since_s`: see Waiting."""

    serial: int
    reserve: Reserve
    peer: str
    deadline: float
    granted: float
    table: list[int]
    spares: list[int]
    num_cached_tokens: int
    entries: Seq[int]
    parts: tuple[PlannedPart, ...]
    marks: list[Mark]
    since_s: float = 0.0
    state: LeaseState = LeaseState.GRANTED
    credits: int = 0
    arrived: set[int] = field(default_factory=set)
    transfer_bytes: int = 0
    last_arrived: float = 0.0  # when the last part arrived, plus the delay until the engine knew
    landed: float = 0.0  # when the engine knew, with the copy queued
    commit: Commit | None = None
    extras: Extras = Extras()
    committed: float = 0.0

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.num_parts

    @property
    def adoptable(self) -> bool:
        """Whether all is here that its peer has to say and to send."""
        return self.state is LeaseState.COMMITTED and self.complete

    @property
    def num_open(self) -> int:
        """How many parts the peer may send, or has sent, that have not landed."""
        return self.credits - len(self.arrived)

    @property
    def is_long(self) -> bool:
        return is_long(len(self.entries))

    @property
    def is_move(self) -> bool:
        """Whether the lease is for a request that moves here: another decode node goes on with it until the Commit."""
        return self.reserve.move > 0

    @property
    def num_tokens(self) -> int:
        """How many tokens of the committed request have KV. They may be fewer than were reserved: spare tokens need not
        be there."""
        assert self.commit is not None
        return len(self.commit.prompt_tokens) + len(self.commit.samples[0].output_tokens) - 1

    def adopted(self, launched: float) -> Adopted:
        """The update for the router when the first step with the request is about to be launched. Transfers before
        the Commit arrived were hidden behind the prompt's computation and count as no time."""
        assert self.commit is not None
        arrived, in_place = max(self.committed, self.last_arrived), max(self.committed, self.landed)
        return Adopted(
            transfer_s=in_place - self.committed,
            num_cached_tokens=self.num_cached_tokens,
            transfer_bytes=self.transfer_bytes,
            commit_s=self.commit.age_s,
            scatter_s=max(0.0, in_place - arrived),
            step_wait_s=max(0.0, launched - in_place),
        )

    @property
    def written(self) -> list[int]:
        """The blocks that the parts fill."""
        return [self.table[entry] for entry in self.entries]

    def is_last_of_rank(self, part: int) -> bool:
        """Whether no later part goes to the same rank."""
        target = self.parts[part].target
        return all(self.parts[later].target != target for later in range(part + 1, len(self.parts)))

    def blocks_of(self, part: PlannedPart) -> list[int]:
        """The pool blocks that a part fills, in all or some of their layers."""
        return [self.table[entry] for entry in self.entries[part.first : part.first + part.num_blocks]]

    def fits(self, commit: Commit) -> bool:
        """Whether the commit matches the Reserve: same attempt, as many computed tokens (spare ones may be missing), no
        more samples."""
        lengths = {len(sample.output_tokens) for sample in commit.samples}
        if commit.attempt_id != self.reserve.attempt_id:
            return False
        if len(lengths) != 1 or len(commit.samples) > self.reserve.num_samples:
            return False
        num_tokens, most = len(commit.prompt_tokens) + lengths.pop() - 1, self.reserve.num_tokens
        return most - self.reserve.num_spare_tokens <= num_tokens <= most
