"""The engine's interface to a second place for KV beside the pool, which gets each evicted block before it is
overwritten.

    block evicted  -->  KvTier.store  -->  the block is overwritten by its new owner
    block wanted   -->  Engine.allocate, BlockManager.begin_load  ... the content arrives ...  finish_load or fail_load

Sequences whose prefix is being loaded wait in the scheduler, and other sequences go ahead of them.
"""

from __future__ import annotations

from typing import Protocol

from engine.block_manager import BlockManager
from engine.prefix_cache import Evicted


class KvTier(Protocol):
    """Memory that holds KV blocks by their hashes. Called on the engine's thread; no method waits for a device."""

    def store(self, evicted: Evicted) -> None:
        """Copy whichever of these blocks are to be kept. Anything launched or received after this call may overwrite
        them, so a copy must be ordered before that, as a launch of the runner is."""


def allocate(blocks: BlockManager, tier: KvTier | None, n: int) -> list[int]:
    """`n` blocks that belong to the caller and may be written from now on; blocks that were evicted for them have been
    passed to the tier. All or nothing: raises CacheExhausted."""
    allocated, evicted = blocks.allocate(n)
    if evicted and tier is not None:
        tier.store(evicted)
    return allocated
