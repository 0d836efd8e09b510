"""Who owns which KV block: counters per block, from which its state follows. No tensor is touched here.

    LOADING     writer                     its content comes from elsewhere: parts of a lease, or a tier
    IN_FLIGHT   else readers > 0           a gather is reading it
    OWNED       else ref > 0               a block table or a lease holds it
    CACHED      else it has a hash         evictable, least recently used first
    FREE        else

Block 0 is the null block: graph padding may write to it, it never has an owner, and no count includes it. Tables have
it where they need no block. The prefix cache keeps the hashes (`engine.prefix_cache`). Every operation costs O(1) per
block that it is given, and takes all blocks of a table at once: a long prompt has thousands, and steps wait while the
engine's thread goes through them. Misuse is a bug and fails an assertion.

A caller who will need blocks later may claim a number of them: so many stay free or evictable for it. Which blocks
these are is open until the caller allocates them.
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
    """Blocks that now belong to the caller, and which of them were evicted for that. An evicted block keeps its content
    until the caller, or a later owner, writes to it; to keep the content, copy it before that."""

    blocks: list[int]
    evicted: Evicted


class BlockManager:
    """Counts references to and pins on `num_blocks` blocks (the null block among them)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2
        self.now = 0.0
        """The time by the caller's clock, in seconds; the caller sets it before any change. Used for `since_s` only."""
        self._ref = [0] * num_blocks
        self._readers = [0] * num_blocks
        self._since_s = [0.0] * num_blocks
        self._cache = PrefixCache(num_blocks)
        self._free = deque(range(1, num_blocks))
        self._in_flight: set[int] = set()  # blocks with readers
        self._loading: set[int] = set()  # blocks with a writer
        self.num_claimed = 0
        """How many blocks, free or cached, are claimed."""

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

    @property
    def num_unclaimed(self) -> int:
        """How many blocks can be allocated without a claim."""
        return len(self._free) + self._cache.num_evictable - self.num_claimed

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
        """The hash under which the block was sealed or is being loaded; None: it has none, so a step may write to
        it."""
        return self._cache.hash_of(block)

    def num_owners(self, block: int) -> int:
        """How many block tables and leases hold the block."""
        return self._ref[block]

    def counters(self, block: int) -> tuple[int, int, int]:
        """(ref, readers, writer)."""
        return self._ref[block], self._readers[block], int(block in self._loading)

    def since_s(self, block: int) -> float:
        """When (by `now`) the block entered its current state."""
        return self._since_s[block]

    # ---- for those that follow the content of the prefix cache ----

    def hashes(self) -> list[BlockHash]:
        """The hashes of all blocks that have one, including loading blocks."""
        return self._cache.hashes()

    def record_changes(self, on: bool) -> None:
        """See `PrefixCache.record`."""
        self._cache.record(on)

    def take_changes(self) -> dict[BlockHash, bool]:
        """See `PrefixCache.take_changes`."""
        return self._cache.take_changes()

    # ---- references ----

    def can_allocate(self, n: int, keep: Sequence[int] = ()) -> bool:
        """Whether `allocate(n)` would succeed after `acquire(keep)`."""
        return n <= self.num_unclaimed - sum(map(self._cache.is_evictable, keep))

    def claim(self, n: int) -> None:
        """Keep `n` blocks for the caller, who gives up the claim with `unclaim` before it allocates them, or does not
        need them."""
        assert 0 <= n <= self.num_unclaimed, f"{n} blocks claimed of {self.num_unclaimed}"
        self.num_claimed += n

    def unclaim(self, n: int) -> None:
        assert 0 <= n <= self.num_claimed, f"{n} claims given up of {self.num_claimed}"
        self.num_claimed -= n

    def allocate(self, n: int) -> Allocation:
        """`n` blocks with one reference and no hash, evicting cached ones once the free ones are used up.

        All or nothing: raises CacheExhausted. The caller gives them back with `release`.
        """
        if not self.can_allocate(n):
            held = f"{self.num_free} free and {self.num_cached} cached, {self.num_claimed} of them claimed"
            raise CacheExhausted(f"{n} KV blocks asked for, {held}")
        blocks = [self._free.popleft() for _ in range(min(n, len(self._free)))]
        evicted = self._cache.evict(n - len(blocks))
        blocks += evicted
        for block in blocks:
            self._ref[block] = 1
        self._changed(blocks)
        return Allocation(blocks, evicted)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is in the cache, and neither loading nor in flight. Changes
        nothing."""
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
        """Whether a block with that hash is being loaded; after the load it is a hit, or no block has the hash."""
        return self.find(block_hash) in self._loading

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these sealed blocks, as returned by `match`."""
        held = [block for block in blocks if block != NULL_BLOCK]
        assert all(self._cache.hashes_of(held)), f"one of the blocks {held} is not sealed"
        assert self._in_flight.isdisjoint(held), f"one of the blocks {held} is in flight"
        assert self._loading.isdisjoint(held), f"one of the blocks {held} is loading"
        ref, revived = self._ref, list[int]()
        for block in held:
            if not ref[block]:
                revived.append(block)
            ref[block] += 1
        self._cache.revive(revived)
        self._changed(revived)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a table, from its end, so that leaves are evicted before their parents.

        A block that is still pinned or loading becomes free or cached when that ends.
        """
        ref, left = self._ref, list[int]()
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert ref[block] > 0, f"block {block} has no owner"
            ref[block] -= 1
            if not ref[block]:
                left.append(block)
        self._settle(left)

    def share(self, blocks: Sequence[int], num_more: int) -> None:
        """Add `num_more` owners to each of these blocks of a table, sealed or not."""
        for block in blocks:
            if block != NULL_BLOCK:
                assert self._ref[block] > 0, f"block {block} has no owner"
                self._ref[block] += num_more

    def seal(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Put full blocks whose KV is complete into the prefix cache, each under its hash. A block gets no hash if
        another block has that hash already; a block that already has its hash is left as it is."""
        assert 0 not in _values(self._ref, blocks), f"one of the blocks {blocks} has no owner"
        assert self._loading.isdisjoint(blocks), f"one of the blocks {blocks} is loading"
        self._cache.add(blocks, hashes)

    # ---- pins: during a gather or a load ----

    def pin_read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._ref[block] > 0, f"block {block} has no owner"
            assert block not in self._loading, f"block {block} is loading"
            if not self._readers[block]:
                self._in_flight.add(block)
                self._since_s[block] = self.now
            self._readers[block] += 1

    def unpin_read(self, blocks: Sequence[int]) -> None:
        read = list[int]()
        for block in blocks:
            assert self._readers[block] > 0, f"block {block} has no reader"
            self._readers[block] -= 1
            if not self._readers[block]:
                self._in_flight.remove(block)
                read.append(block)
        self._settle(read)

    def begin_load(self, blocks: Sequence[int], hashes: Sequence[BlockHash] = ()) -> None:
        """Mark blocks as loading: their content arrives from elsewhere, at any time until `finish_load` or `fail_load`.
        Each has one owner, which may release it meanwhile.

        hashes: one for each block, which no other block may have; or none at all. From now on, `is_loading` finds a
        block by its hash, so that sequences can wait for it; `match` finds it once it is loaded.
        """
        assert not hashes or len(hashes) == len(blocks), f"{len(hashes)} hashes for {len(blocks)} blocks"
        assert _values(self._ref, blocks) <= {1}, f"one of the blocks {blocks} has not one owner"
        assert _values(self._readers, blocks) <= {0}, f"one of the blocks {blocks} is being read"
        assert not any(self._cache.hashes_of(blocks)), f"one of the blocks {blocks} is sealed"
        loading = len(self._loading)
        self._loading.update(blocks)
        assert len(self._loading) == loading + len(blocks), f"one of the blocks {blocks} is loading"
        self._changed(blocks)
        if hashes:
            self._cache.add(blocks, hashes)
            assert all(self._cache.hashes_of(blocks)), "a block would be loaded as what another block is"

    def finish_load(self, blocks: Sequence[int]) -> None:
        """End a load: everything launched from now on finds the content in the blocks."""
        loading = len(self._loading)
        self._loading.difference_update(blocks)
        assert len(self._loading) == loading - len(blocks), f"one of the blocks {blocks} is not loading"
        self._settle(blocks)

    def fail_load(self, blocks: Sequence[int]) -> None:
        """End a load whose content will not arrive: the blocks lose their hashes, and sequences that waited for them
        compute the tokens themselves."""
        for block in blocks:
            if self._cache.hash_of(block) is not None:
                self._cache.remove(block)
        self.finish_load(blocks)

    # ---- internal ----

    def _settle(self, blocks: Iterable[int]) -> None:
        """Of blocks without owner, pin and load, make those with a hash evictable, and free the others."""
        ref, readers, loading, since_s, now = self._ref, self._readers, self._loading, self._since_s, self.now
        for block in blocks:
            if readers[block] or block in loading:
                continue
            since_s[block] = now
            if ref[block]:
                continue
            if self._cache.hash_of(block) is None:
                self._free.append(block)
            else:
                self._cache.retire(block)

    def _changed(self, blocks: Iterable[int]) -> None:
        """Note that the blocks enter another state now."""
        since_s, now = self._since_s, self.now
        for block in blocks:
            since_s[block] = now

    def check_integrity(
        self,
        owned: Iterable[Sequence[int]],
        read: Iterable[Sequence[int]] = (),
        written: Iterable[Sequence[int]] = (),
    ) -> None:
        """Assert that every counter equals a recount from all block tables, leases and open pins (each block as often
        as it is pinned), and that every block is filed in exactly one place. Null blocks in tables do not count."""
        counted = [_recount(tables, len(self._ref)) for tables in (owned, read, written)]
        loading = _recount([self._loading], len(self._ref))
        held, recounted = list(zip(self._ref, self._readers, loading, strict=True)), list(zip(*counted, strict=True))
        if held != recounted:
            block = next(block for block, of_it in enumerate(held) if of_it != recounted[block])
            raise AssertionError(f"block {block}: {held[block]} is not the recount {recounted[block]}")
        in_flight = {block for block, readers in enumerate(self._readers) if readers}
        assert in_flight == self._in_flight, f"{in_flight ^ self._in_flight} are in flight, or filed as such"
        for block in self._loading:
            # Its owner may have released it, but nobody else can acquire it while it loads.
            assert self._ref[block] <= 1, f"block {block} is shared and loading"
            assert not self._readers[block], f"block {block} is read and loading"
        self._check_unused({block for block, of_it in enumerate(held) if of_it == (0, 0, 0)} - {NULL_BLOCK})
        assert 0 <= self.num_claimed <= self.num_free + self.num_cached, f"{self.num_claimed} blocks are claimed"
        assert sum(self.counts_by_state().values()) == self.num_total

    def _check_unused(self, unused: set[int]) -> None:
        """Assert that those with a hash are evictable, the others free, and nothing else is."""
        self._cache.check_integrity()
        assert self._cache.hash_of(NULL_BLOCK) is None, "the null block is sealed"
        cached = {block for block in unused if self._cache.hash_of(block) is not None}
        wrong = self._cache.evictable ^ cached
        assert not wrong, f"{wrong} are evictable and not cached, or the other way round"
        assert sorted(self._free) == sorted(unused - cached), f"free are {unused - cached}, and listed {self._free}"


def _recount(tables: Iterable[Iterable[int]], num_blocks: int) -> list[int]:
    """How often each block is in them; null blocks do not count."""
    counts = [0] * num_blocks
    for block, count in Counter(itertools.chain.from_iterable(tables)).items():
        counts[block] = count
    counts[NULL_BLOCK] = 0
    return counts


def _values(column: list[int], blocks: Iterable[int]) -> set[int]:
    """The values of these blocks in `column`, without a loop in Python."""
    return set(map(column.__getitem__, blocks))
