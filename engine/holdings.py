"""The blocks of each holder: the input for recounting the block manager's counters, and for an audit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.audit import KvBlock, KvHolder, KvUse, without_epoch
from baton.messages import AttemptId
from engine.block_manager import BlockManager, BlockState


@dataclass(frozen=True, slots=True)
class Holding:
    """The blocks of one holder, each held as often as it is listed; the fields are those of `KvHolder`, except the
    epoch.

    `since_s` is a time by the role's clock.
    """

    kind: str
    state: str
    attempt_id: AttemptId
    samples: tuple[int, ...]
    since_s: float
    blocks: Sequence[int]
    use: KvUse = KvUse.OWNS
    lease: int = 0
    peer: str = ""

    def holder(self, now: float) -> KvHolder:
        age_s, attempt_id = now - self.since_s, without_epoch(self.attempt_id)
        return KvHolder(self.kind, self.state, self.use, attempt_id, self.samples, self.lease, self.peer, age_s)


def recount(blocks: BlockManager, holdings: Iterable[Holding]) -> None:
    """Assert that the block manager's counters equal what these holdings add up to."""
    held: dict[KvUse, list[Sequence[int]]] = {use: [] for use in KvUse}
    for holding in holdings:
        held[holding.use].append(holding.blocks)
    blocks.check_integrity(held[KvUse.OWNS], held[KvUse.READS], held[KvUse.WRITES])


def list_blocks(blocks: BlockManager, holdings: Sequence[Holding], now: float) -> tuple[KvBlock, ...]:
    """Every block that is not free or that a holding lists, even if the two disagree."""
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for index, holding in enumerate(holdings):
        for block in holding.blocks:
            holders[block].append(index)
    listed = []
    for block in range(1, blocks.num_total + 1):
        state = blocks.state(block)
        if state is BlockState.FREE and block not in holders:
            continue
        ref, readers, writer = blocks.counters(block)
        name = (blocks.hash_of(block) or b"").hex()
        age_s = now - blocks.since_s(block)
        listed.append(KvBlock(block, state.value, ref, readers, writer, name, tuple(holders.get(block, ())), age_s))
    return tuple(listed)
