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
"""More blocks than these are many parts, whose threads compete with that of the engine for the interpreter."""


def is_long(num_blocks: int) -> bool:
    """Whether a prompt with so many delays what comes after it in a turn of the engine."""
    return num_blocks > LONG_BLOCKS


class LeaseState(enum.Enum):
    """A lease from Grant to its end.

        GRANTED --Commit--> COMMITTED --all parts landed--> (gone: Adopted, the engine owns the blocks)
           |                    |
           `--------------------+--- Release, Abort, deadline, peer or router lost: blocks are freed at once;
                                     slots when their parts have arrived or failed

    All parts may land before the Commit. The network never writes to a pool block, so a lease can end at once in any
    state: from `KvReceiver.withdraw` on, parts that arrive for it stay in their slots.
    """

    GRANTED = "granted"
    COMMITTED = "committed"


@dataclass(slots=True)
class Waiting:
    """A Reserve in the queue. `since_s`: when its request came to the router, by this node's clock. `num_blocks`: those
    of its table, whether they are here already or not."""

    reserve: Reserve
    peer: str
    deadline: float
    since_s: float
    num_blocks: int

    @property
    def due_s(self) -> float:
        """Where it stands in the queue."""
        return due_s(self.reserve.priority, self.since_s)

    @property
    def is_long(self) -> bool:
        return is_long(self.num_blocks)


@dataclass(frozen=True, slots=True)
class Extras:
    """What the sequences of a committed request have beside its parameters, made of these."""

    processors: LogitsProcessorChain | None = None
    beams: BeamGroup[Sequence] | None = None


@dataclass(slots=True)
class Lease:
    """Room for one request's KV. `table` holds the prefix found here, the blocks to fill, and the ones that the first
    step writes to; `spares` those of further samples. The lease owns them until adoption or its end.
    `num_cached_tokens`: of the prompt, whose KV was here already. `parts`: what the prefill node sends, of the table's
    `entries`; `marks`: each rank's earlier work, some of which may still use these blocks. `since_s`: see Waiting."""

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
    def num_open(self) -> int:
        """Parts that the peer may send and that have not landed."""
        return self.credits - len(self.arrived)

    @property
    def is_long(self) -> bool:
        return is_long(len(self.entries))

    @property
    def is_move(self) -> bool:
        """Whether it is of a request that another decode node goes on with until the Commit."""
        return self.reserve.move > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the committed request whose KV comes with it: spare ones may be missing."""
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
        """The pool blocks of which a part fills all or some layers."""
        return [self.table[entry] for entry in self.entries[part.first : part.first + part.num_blocks]]

    def fits(self, commit: Commit) -> bool:
        """Whether the commit matches the Reserve: same attempt, as many computed tokens, no more samples. Spare tokens
        need not be there."""
        lengths = {len(sample.output_tokens) for sample in commit.samples}
        if commit.attempt_id != self.reserve.attempt_id:
            return False
        if len(lengths) != 1 or len(commit.samples) > self.reserve.num_samples:
            return False
        num_tokens, most = len(commit.prompt_tokens) + lengths.pop() - 1, self.reserve.num_tokens
        return most - self.reserve.num_spare_tokens <= num_tokens <= most
