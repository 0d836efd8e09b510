"""A tier that keeps every block that is evicted, and brings back what it is asked for, when it is told to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.audit import KvUse
from baton.block_hash import BlockHash, of_group
from baton.messages import AttemptId
from engine.engine import Engine
from engine.holdings import Holding
from engine.prefix_cache import Evicted
from engine.sequence import Sequence as EngineSequence
from tests.protocol.fake_model import FakeModel

NOBODY = AttemptId(0, "", 0)


@dataclass(eq=False)
class Load:
    """Blocks that are on their way. `owned`: they are the tier's until it has let go of them."""

    blocks: list[int]
    hashes: list[BlockHash]
    owned: bool = True


class FakeTier:
    """Implements `engine.tier.KvTier`. Its copies happen on the model's device, in order of its launches."""

    def __init__(self, model: FakeModel) -> None:
        self.engine: Engine
        self.loads: list[Load] = []
        self.num_stored = 0
        self._model = model
        self._kept: dict[BlockHash, Tensor] = {}  # [bytes of a block] each

    def store(self, evicted: Evicted) -> None:
        for block, block_hash in evicted.items():
            assert self.engine.blocks.find(block_hash) != block, "it is not evicted"
            self.num_stored += 1
            kept = self._kept[block_hash] = torch.zeros_like(self._model.pool_bytes[block])
            self._model.enqueue(partial(self._copy, self._model.pool_bytes[block], kept))

    def begin(self, seq: EngineSequence) -> Load | None:
        """Have the blocks loaded that a waiting sequence lacks, as far as they are kept and there is room."""
        blocks, block_size = self.engine.blocks, self.engine.config.block_size
        hashes = seq.block_hashes((seq.num_tokens - 1) // block_size, block_size)
        wanted: list[BlockHash] = []
        tables = self.engine.tables
        missing = hashes[tables.num_columns(tables.match(hashes)[0]) :]
        for name in [of_group(block_hash, group) for block_hash in missing for group in range(tables.shape.width)]:
            if name not in self._kept or (blocks.find(name) is not None and tables.shape.width == 1):
                break
            if blocks.find(name) is None:
                wanted.append(name)
        if not wanted or not blocks.can_allocate(len(wanted)):
            return None
        load = Load(self.engine.allocate(len(wanted)), wanted)
        blocks.begin_load(load.blocks, wanted)
        self.loads.append(load)
        return load

    def finish(self, load: Load) -> None:
        for block, block_hash in zip(load.blocks, load.hashes, strict=True):
            self._model.enqueue(partial(self._copy, self._kept[block_hash], self._model.pool_bytes[block]))
        self.engine.blocks.finish_load(load.blocks)
        self._end(load)

    def fail(self, load: Load) -> None:
        self.engine.blocks.fail_load(load.blocks)
        self._end(load)

    def let_go(self, load: Load) -> None:
        """What was begun goes on, and is nobody's."""
        self.engine.blocks.release(load.blocks)
        load.owned = False

    def holdings(self) -> list[Holding]:
        return [
            Holding("load", "loading", NOBODY, (), 0.0, load.blocks, use)
            for load in self.loads
            for use in (KvUse.OWNS, KvUse.WRITES)
            if use is KvUse.WRITES or load.owned
        ]

    def _end(self, load: Load) -> None:
        self.loads.remove(load)
        if load.owned:
            self.let_go(load)

    @staticmethod
    def _copy(source: Tensor, target: Tensor) -> None:
        target.copy_(source)
