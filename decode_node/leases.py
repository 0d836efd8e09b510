"""What a decode node has promised to prefill nodes: who waits for room, and who has it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.layout import num_blocks_for
from baton.messages import Commit, Reserve


class LeaseState(enum.Enum):
    """A lease from Grant to its end.

        GRANTED --Commit--> COMMITTED --no part missing--> (gone: Adopted, the engine owns the blocks)
           |                    |
           `--------------------+--- Release, Abort, deadline, peer or router lost: blocks go back at once;
                                     slots when their parts have come or failed

    Parts may all be in before the Commit. No byte of the network touches a pool block, so ending a lease in any state
    is safe at once: a late part lands in a slot whose lease is gone, and is discarded.
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
    first step writes into; `spares` those of further samples. All are the lease's until adoption or its end."""

    serial: int
    reserve: Reserve
    peer: str
    deadline: float
    granted: float
    table: list[int]
    spares: list[int]
    num_held: int
    part_blocks: int
    block_size: int
    state: LeaseState = LeaseState.GRANTED
    credits: int = 0
    arrived: set[int] = field(default_factory=set)
    transfer_bytes: int = 0
    commit: Commit | None = None
    committed: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the computed tokens."""
        return num_blocks_for(self.reserve.num_tokens, self.block_size)

    @property
    def num_parts(self) -> int:
        return -(-(self.num_blocks - self.num_held) // self.part_blocks)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.num_parts

    @property
    def num_open(self) -> int:
        """Parts that the peer may send and that have not come."""
        return self.credits - len(self.arrived)

    def blocks_of(self, part: int) -> list[int]:
        """The pool blocks that a part fills."""
        first = self.num_held + part * self.part_blocks
        return self.table[first : min(first + self.part_blocks, self.num_blocks)]

    def fits(self, commit: Commit) -> bool:
        """Whether the commit is for what was reserved: this work, as many computed tokens, no more samples."""
        lengths = {len(sample.output_tokens) for sample in commit.samples}
        if commit.work != self.reserve.work or len(lengths) != 1 or len(commit.samples) > self.reserve.num_samples:
            return False
        return len(commit.prompt_tokens) + lengths.pop() - 1 == self.reserve.num_tokens
