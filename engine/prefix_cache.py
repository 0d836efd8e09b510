"""Which full blocks hold the KV of which tokens, and which of them may be evicted. No tensor is touched here.

A block's hash covers all tokens up to its end (`baton.block_hash`), so equal hashes mean equal KV. No two blocks have
the same hash. `engine.block_manager` counts the owners of a block and reports when the last one is gone. Every
operation is O(1) per block named.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from baton.block_hash import BlockHash

Evicted = dict[int, BlockHash]
"""By block, the hash that it has just lost to make room. Its content stays until the new owner writes."""
T = TypeVar("T")


class PrefixCache:
    """Hashes of blocks 0 to `num_blocks - 1`, and the evictable ones in order of their last use."""

    def __init__(self, num_blocks: int) -> None:
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: dict[BlockHash, bool] | None = None  # hash -> whether it is here now; None: not recorded

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    @property
    def evictable(self) -> set[int]:
        return set(self._evictable)

    def hash_of(self, block: int) -> BlockHash | None:
        return self._hash[block]

    def hashes_of(self, blocks: Iterable[int]) -> Iterator[BlockHash | None]:
        return map(self._hash.__getitem__, blocks)

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with that hash, whatever its state."""
        return self._block_of.get(block_hash)

    def add(self, blocks: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        """Give blocks their hashes. A block whose hash another one has gets none; one that has its hash keeps it."""
        hash_of, block_of, changes = self._hash, self._block_of, self._changes
        for block, block_hash in zip(blocks, hashes, strict=True):
            known = hash_of[block]
            if known is not None:
                assert known == block_hash, f"block {block} has another hash"
            elif block_of.setdefault(block_hash, block) == block:
                hash_of[block] = block_hash
                if changes is not None:
                    changes[block_hash] = True

    def remove(self, block: int) -> BlockHash:
        """Take a block's hash away and return it."""
        block_hash = self._hash[block]
        assert block_hash is not None, f"block {block} has no hash"
        self._hash[block] = None
        del self._block_of[block_hash]
        if self._changes is not None:
            self._changes[block_hash] = False
        return block_hash

    def retire(self, block: int) -> None:
        """Make a block whose last owner is gone evictable, after all blocks that were used before it."""
        assert self._hash[block] is not None, f"block {block} has no hash"
        self._evictable[block] = None

    def revive(self, blocks: Iterable[int]) -> None:
        """Make blocks that have an owner again not evictable."""
        for block in blocks:
            del self._evictable[block]

    def evict(self, n: int) -> Evicted:
        """Take the `n` least recently used evictable blocks and their hashes; the blocks become the caller's."""
        blocks = list(itertools.islice(self._evictable, n))
        assert len(blocks) == n, f"{n} blocks to evict of {len(self._evictable)}"
        hashes = [block_hash for block_hash in self.hashes_of(blocks) if block_hash is not None]
        assert len(hashes) == n, f"one of the blocks {blocks} has no hash"
        _with_each(self._evictable.__delitem__, blocks)
        _with_each(self._block_of.__delitem__, hashes)
        hash_of = self._hash
        for block in blocks:
            hash_of[block] = None
        if self._changes is not None:
            self._changes.update(dict.fromkeys(hashes, False))
        return dict(zip(blocks, hashes, strict=True))

    # ---- for those that follow the cache's content ----

    def hashes(self) -> list[BlockHash]:
        """All hashes, oldest first."""
        return list(self._block_of)

    def record(self, on: bool) -> None:
        """Start or stop recording changes. Changes recorded so far are dropped."""
        self._changes = {} if on else None

    def take_changes(self) -> dict[BlockHash, bool]:
        """Each hash that was added or removed since the last call, and whether it is here now."""
        if not self._changes:
            return {}
        taken, self._changes = self._changes, {}
        return taken

    def check_integrity(self) -> None:
        assert {name: block for block, name in enumerate(self._hash) if name is not None} == self._block_of
        assert all(self._hash[block] is not None for block in self._evictable), "a block without a hash is evictable"


def _with_each(function: Callable[[T], object], arguments: Iterable[T]) -> None:
    """Call the function with each argument, without a loop in Python: of a long prompt's blocks, there are
    thousands."""
    deque(map(function, arguments), maxlen=0)
