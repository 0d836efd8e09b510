"""Where KV can be kept beside the pool, seen from the engine: it tells what leaves the pool, before it is gone.

    block evicted  -->  KvTier.store  -->  the block is written by whoever has it now
    block wanted   -->  Engine.allocate, BlockManager.begin_load  ... the content comes ...  finish_load or fail_load

Sequences whose prefix is being loaded wait for it in the scheduler, and let the others past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.prefix_cache import Evicted


class KvTier(Protocol):
    """Memory that holds KV blocks by their hashes. Called on the engine's thread; nothing here waits for a device."""

    def store(self, evicted: Sequence[Evicted]) -> None:
        """Take what you want to keep of these blocks. Whatever is launched or received after this call may write them,
        so a copy must be ordered before that, as a launch of the runner's is."""
