"""What a decode node has promised to prefill nodes: who waits for room, and who has it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.messages import Adopted, Commit, Reserve
from kv_transfer.parts import Piece
from kv_transfer.slot_copies import Mark


class LeaseState(enum.Enum):
    """A lease from Grant to its end.

        GRANTED --Commit--> COMMITTED --no part missing--> (gone: Adopted, the engine owns the blocks)
           |                    |
           `--------------------+--- Release, Abort, deadline, peer or router lost: blocks go back at once;
                                     slots when their parts have come or failed

    Parts may all be in before the Commit. No byte of the network touches a pool block, so ending a lease in any state
    is safe at once: from `KvReceiver.withdraw` on, what arrives for it goes no further than its slot.
    """

    GRANTED = "granted"
    COMMITTED = "committed"


@dataclass(slots=True)
class Waiting:
    """A Reserve in the queue."""

    reserve: Reserve
    peer: str
    deadline: float


@dataclass(slots=True)
class Lease:
    """Room for one request's KV. `table` holds the prefix found here, the blocks to be filled, and the one that the
    first step writes into; `spares` those of further samples. All are the lease's until adoption or its end. `parts`:
    what the prefill node sends; `marks`: each rank's work before it, some of which may use these blocks yet."""

    serial: int
    reserve: Reserve
    peer: str
    deadline: float
    granted: float
    table: list[int]
    spares: list[int]
    num_held: int
    parts: tuple[Piece, ...]
    marks: list[Mark]
    block_size: int
    state: LeaseState = LeaseState.GRANTED
    credits: int = 0
    arrived: set[int] = field(default_factory=set)
    transfer_bytes: int = 0
    last_arrived: float = 0.0  # when the last of them came, but for the time until the engine heard of it
    landed: float = 0.0  # when it heard, with the copy queued
    commit: Commit | None = None
    committed: float = 0.0

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.num_parts

    @property
    def num_open(self) -> int:
        """Parts that the peer may send and that have not come."""
        return self.credits - len(self.arrived)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, whose KV was here already."""
        return self.num_held * self.block_size

    def adopted(self, begun: float) -> Adopted:
        """What the router is told when the first step with the request begins, at `begun`. What happened before
        the Commit came was hidden behind the prompt's computing, and takes no time here."""
        assert self.commit is not None
        arrived, in_place = max(self.committed, self.last_arrived), max(self.committed, self.landed)
        return Adopted(
            transfer_s=in_place - self.committed,
            num_cached_tokens=self.num_cached_tokens,
            transfer_bytes=self.transfer_bytes,
            commit_s=self.commit.age_s,
            scatter_s=max(0.0, in_place - arrived),
            step_wait_s=max(0.0, begun - in_place),
        )

    @property
    def written(self) -> list[int]:
        """The blocks that parts fill."""
        return self.table[self.num_held : max((part.first + part.num_blocks for part in self.parts), default=0)]

    def is_last_of_rank(self, part: int) -> bool:
        """Whether no later part goes to the same rank."""
        target = self.parts[part].target
        return all(self.parts[later].target != target for later in range(part + 1, len(self.parts)))

    def blocks_of(self, part: Piece) -> list[int]:
        """The pool blocks that a part fills, all or some layers of them."""
        return self.table[part.first : part.first + part.num_blocks]

    def fits(self, commit: Commit) -> bool:
        """Whether the commit is for what was reserved: this work, as many computed tokens, no more samples."""
        lengths = {len(sample.output_tokens) for sample in commit.samples}
        if commit.attempt_id != self.reserve.attempt_id:
            return False
        if len(lengths) != 1 or len(commit.samples) > self.reserve.num_samples:
            return False
        return len(commit.prompt_tokens) + lengths.pop() - 1 == self.reserve.num_tokens
