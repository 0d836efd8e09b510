"""Which KV block belongs to whom: counters per block, from which its state follows. No tensor is touched here.

    LOADING     writer                     its content comes from elsewhere: parts of a lease, or what a tier kept
    IN_FLIGHT   else readers > 0           a gather is at work on it
    OWNED       else ref > 0               a block table or a lease holds it
    CACHED      else it has a hash         evictable, least recently used first
    FREE        else

Block 0 is the null block: graph padding may write there, nobody may own it, and no count includes it. Hashes are the
prefix cache's (`engine.prefix_cache`). Every operation is O(1) per block named. Misuse is a bug of ours and fails an
assertion.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.block_hash import BlockHash
from baton.errors import CacheExhausted
from engine.prefix_cache import Evicted, PrefixCache

NULL_BLOCK = 0


class BlockState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    OWNED = "owned"
    IN_FLIGHT = "in_flight"
    LOADING = "loading"


class Allocation(NamedTuple):
    """Blocks that are the caller's now, and those of them that were evicted for it. An evicted block's content is there
    until the caller, or whoever it hands the block to, writes: who wants to keep it takes it before that."""

    blocks: list[int]
    evicted: list[Evicted]


class BlockManager:
    """Counts references to and pins on `num_blocks` blocks (the null block among them)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2
        assert block_size >= 1
        self.block_size = block_size
        self.now = 0.0
        """The caller's clock in seconds, which it sets before it changes anything: for `since_s` alone."""
        self._ref = [0] * num_blocks
        self._readers = [0] * num_blocks
        self._since_s = [0.0] * num_blocks
        self._cache = PrefixCache(num_blocks)
        self._free = deque(range(1, num_blocks))
        self._in_flight: set[int] = set()  # those with readers
        self._loading: set[int] = set()  # those with a writer

    # ---- counts ----

    @property
    def num_total(self) -> int:
        return len(self._ref) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cache.num_evictable

    def counts_by_state(self) -> dict[BlockState, int]:
        counts = {
            BlockState.FREE: self.num_free,
            BlockState.CACHED: self.num_cached,
            BlockState.IN_FLIGHT: len(self._in_flight),
            BlockState.LOADING: len(self._loading),
        }
        return counts | {BlockState.OWNED: self.num_total - sum(counts.values())}

    def state(self, block: int) -> BlockState:
        if block in self._loading:
            return BlockState.LOADING
        if self._readers[block]:
            return BlockState.IN_FLIGHT
        if self._ref[block]:
            return BlockState.OWNED
        return BlockState.FREE if self._cache.hash_of(block) is None else BlockState.CACHED

    def hash_of(self, block: int) -> BlockHash | None:
        """What the block was sealed, or is being loaded, as; None while it may be written by a step."""
        return self._cache.hash_of(block)

    def num_owners(self, block: int) -> int:
        """Block tables and leases that hold it."""
        return self._ref[block]

    def counters(self, block: int) -> tuple[int, int, int]:
        """(ref, readers, writer)."""
        return self._ref[block], self._readers[block], int(block in self._loading)

    def since_s(self, block: int) -> float:
        """When (`now`) it came into the state that it is in."""
        return self._since_s[block]

    # ---- references ----

    def can_allocate(self, n: int, keep: Sequence[int] = ()) -> bool:
        """Whether `allocate(n)` succeeds, also after `acquire(keep)`."""
        num_evictable = self.num_cached - sum(map(self._cache.is_evictable, keep))
        return n <= len(self._free) + num_evictable

    def allocate(self, n: int) -> Allocation:
        """`n` blocks with one reference and no hash, evicting cached ones once the free ones are used up.

        All or nothing: raises CacheExhausted. The caller gives them back with `release`.
        """
        if not self.can_allocate(n):
            raise CacheExhausted(f"{n} KV blocks asked for, {self.num_free} free and {self.num_cached} cached")
        blocks = [self._free.popleft() for _ in range(min(n, len(self._free)))]
        evicted = [self._cache.evict() for _ in range(n - len(blocks))]
        blocks += [block for block, _ in evicted]
        for block in blocks:
            self._ref[block] = 1
            self._since_s[block] = self.now
        return Allocation(blocks, evicted)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is here, neither loading nor in flight. Changes nothing."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._cache.find(block_hash)
            if block is None or block in self._in_flight or block in self._loading:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that has the hash, whatever its state."""
        return self._cache.find(block_hash)

    def is_loading(self, block_hash: BlockHash) -> bool:
        """Whether a block is being loaded as that: soon it is a hit, or no block has the hash."""
        return self.find(block_hash) in self._loading

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of the sealed blocks, as `match` found them."""
        for block in blocks:
            assert self._cache.hash_of(block) is not None, f"block {block} is not sealed"
            assert block not in self._in_flight, f"block {block} is in flight"
            assert block not in self._loading, f"block {block} is loading"
            if not self._ref[block]:
                self._cache.revive(block)
                self._since_s[block] = self.now
            self._ref[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a table: from its end, so that leaves are evicted before their parents.

        A block still pinned settles when its last pin goes.
        """
        for block in reversed(blocks):
            assert self._ref[block] > 0, f"block {block} has no owner"
            self._ref[block] -= 1
            if not self._ref[block]:
                self._settle(block)

    def fork(
        self, table: Sequence[int], num_computed_tokens: int, spare_blocks: Sequence[int]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Split one table into 1 + len(spare_blocks) tables, and say which blocks to copy, as (source, destination).

        `table` covers the computed tokens and the one after: `num_computed_tokens // block_size` full blocks, which
        all forks share, and one more, which the next step of each fork writes. The first fork keeps that one, each
        other takes a spare; when it is partly filled its content must be copied. `table` and the spares, all
        allocated by the caller, become the forks'.
        """
        num_full = num_computed_tokens // self.block_size
        assert len(table) == num_full + 1, f"{len(table)} blocks for {num_computed_tokens} tokens and the next"
        for block in table[:num_full]:
            self._ref[block] += len(spare_blocks)
        tables = [[*table[:num_full], own] for own in (table[num_full], *spare_blocks)]
        partial = num_computed_tokens % self.block_size > 0
        return tables, [(table[num_full], spare) for spare in spare_blocks] if partial else []

    def seal(self, block: int, block_hash: BlockHash) -> bool:
        """Put a full block whose KV is complete into the prefix cache. False: another block has the hash, and this one
        stays without. A block that has the hash already stays as it is."""
        assert self._ref[block] > 0, f"block {block} has no owner"
        assert block not in self._loading, f"block {block} is loading"
        if (known := self._cache.hash_of(block)) is not None:
            assert known == block_hash, f"block {block} has another hash"
            return True
        return self._cache.add(block, block_hash)

    # ---- pins: for the time of a gather, or of a load ----

    def pin_read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._ref[block] > 0, f"block {block} has no owner"
            assert block not in self._loading, f"block {block} is loading"
            if not self._readers[block]:
                self._in_flight.add(block)
                self._since_s[block] = self.now
            self._readers[block] += 1

    def unpin_read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._readers[block] > 0, f"block {block} has no reader"
            self._readers[block] -= 1
            if not self._readers[block]:
                self._in_flight.remove(block)
                self._settle(block)

    def begin_load(self, blocks: Sequence[int], hashes: Sequence[BlockHash] = ()) -> None:
        """From now on the content of these blocks comes from elsewhere, whenever it does, until `finish_load` or
        `fail_load`. Each has one owner, who may leave meanwhile.

        hashes: one for each block, none of which another block has; or none at all. A block that has one is found by
        `is_loading` from now on and by `match` when it is loaded: so others can wait for it.
        """
        assert not hashes or len(hashes) == len(blocks), f"{len(hashes)} hashes for {len(blocks)} blocks"
        for block in blocks:
            assert self._ref[block] == 1, f"block {block} has {self._ref[block]} owners"
            assert self._cache.hash_of(block) is None, f"block {block} is sealed"
            assert not self._readers[block], f"block {block} is being read"
            assert block not in self._loading, f"block {block} is loading"
            self._loading.add(block)
            self._since_s[block] = self.now
        for block, block_hash in zip(blocks, hashes, strict=False):
            added = self._cache.add(block, block_hash)
            assert added, f"block {block} would be loaded as what another block is"

    def finish_load(self, blocks: Sequence[int]) -> None:
        """The content is there, for all that is launched from now on."""
        for block in blocks:
            assert block in self._loading, f"block {block} is not loading"
            self._loading.remove(block)
            self._settle(block)

    def fail_load(self, blocks: Sequence[int]) -> None:
        """Nothing comes any more: the blocks are nobody's hit, and whoever waited for them computes their tokens."""
        for block in blocks:
            if self._cache.hash_of(block) is not None:
                self._cache.remove(block)
        self.finish_load(blocks)

    # ---- inside ----

    def _settle(self, block: int) -> None:
        """File the block where its state says, after its last owner or pin went."""
        if self._readers[block] or block in self._loading:
            return
        self._since_s[block] = self.now
        if self._ref[block]:
            return
        if self._cache.hash_of(block) is None:
            self._free.append(block)
        else:
            self._cache.retire(block)

    def check_integrity(
        self,
        owned: Iterable[Sequence[int]],
        read: Iterable[Sequence[int]] = (),
        written: Iterable[Sequence[int]] = (),
    ) -> None:
        """Assert that every counter equals a recount from all block tables, leases and open pins (of blocks, each as
        often as it is pinned), and that every block is filed in exactly one place."""
        owners, pins_r, pins_w = (Counter(itertools.chain.from_iterable(all_)) for all_ in (owned, read, written))
        num_free = Counter(self._free)
        self._cache.check_integrity()
        for block in range(1, len(self._ref)):
            held = self.counters(block)
            assert held == (owners[block], pins_r[block], pins_w[block]), f"block {block}: {held} is not the recount"
            self._check_block(block, num_free[block])
        assert not owners[NULL_BLOCK], "the null block is owned"
        assert self._cache.hash_of(NULL_BLOCK) is None, "the null block is sealed"
        assert not num_free[NULL_BLOCK], "the null block is free"
        assert sum(self.counts_by_state().values()) == self.num_total

    def _check_block(self, block: int, times_free: int) -> None:
        state = self.state(block)
        assert (self._readers[block] > 0) == (block in self._in_flight), f"block {block} is {state.name}"
        assert (state is BlockState.CACHED) == self._cache.is_evictable(block), f"block {block} is {state.name}"
        assert times_free == (state is BlockState.FREE), f"block {block} is {state.name}, and {times_free} x free"
        if state is BlockState.LOADING:
            # One whose owner has let go goes on alone; nobody can come to share the block meanwhile.
            assert self._ref[block] <= 1, f"block {block} is shared and loading"
            assert not self._readers[block], f"block {block} is read and loading"
