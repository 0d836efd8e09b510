"""Which KV block belongs to whom: counters per block, from which its state follows. No tensor is touched here.

    IN_FLIGHT   readers + writer > 0       a gather is at work on it, or parts from elsewhere go into it
    OWNED       else ref > 0               a block table or a lease holds it
    CACHED      else it has a hash         evictable, least recently used first
    FREE        else

Block 0 is the null block: graph padding may write there, nobody may own it, and no count includes it.
Every operation is O(1) per block named. Misuse is a bug of ours and fails an assertion.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.block_hash import BlockHash
from baton.errors import CacheExhausted

NULL_BLOCK = 0


class BlockState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    OWNED = "owned"
    IN_FLIGHT = "in_flight"


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Net changes of the prefix cache: a hash is in one list at most."""

    stored: list[BlockHash] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)


class BlockManager:
    """Counts references to and pins on `num_blocks` blocks (the null block among them), and names the full ones."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2
        assert block_size >= 1
        self.block_size = block_size
        self.now = 0.0
        """The caller's clock in seconds, which it sets before it changes anything: for `since_s` alone."""
        self._ref = [0] * num_blocks
        self._readers = [0] * num_blocks
        self._writer = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._since_s = [0.0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._free = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._in_flight: set[int] = set()
        self._events: dict[BlockHash, bool] | None = None  # hash -> stored (else removed); None: nobody listens

    # ---- counts ----

    @property
    def num_total(self) -> int:
        return len(self._ref) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def counts_by_state(self) -> dict[BlockState, int]:
        idle = len(self._free) + len(self._cached)
        return {
            BlockState.FREE: len(self._free),
            BlockState.CACHED: len(self._cached),
            BlockState.OWNED: self.num_total - idle - len(self._in_flight),
            BlockState.IN_FLIGHT: len(self._in_flight),
        }

    def state(self, block: int) -> BlockState:
        if self._readers[block] or self._writer[block]:
            return BlockState.IN_FLIGHT
        if self._ref[block]:
            return BlockState.OWNED
        return BlockState.FREE if self._hash[block] is None else BlockState.CACHED

    def hash_of(self, block: int) -> BlockHash | None:
        """The name that the block was sealed with; None while it may be written."""
        return self._hash[block]

    def num_owners(self, block: int) -> int:
        """Block tables and leases that hold it."""
        return self._ref[block]

    def counters(self, block: int) -> tuple[int, int, int]:
        """(ref, readers, writer)."""
        return self._ref[block], self._readers[block], self._writer[block]

    def since_s(self, block: int) -> float:
        """When (`now`) it came into the state that it is in."""
        return self._since_s[block]

    # ---- references ----

    def can_allocate(self, n: int, keep: Sequence[int] = ()) -> bool:
        """Whether `allocate(n)` succeeds, also after `acquire(keep)`."""
        evictable = len(self._cached) - sum(block in self._cached for block in keep)
        return n <= len(self._free) + evictable

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference and no hash, evicting cached ones once the free ones are used up.

        All or nothing: raises CacheExhausted. The caller frees them with `release`.
        """
        if not self.can_allocate(n):
            raise CacheExhausted(f"{n} KV blocks asked for, {len(self._free)} free and {len(self._cached)} cached")
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(n)]
        for block in blocks:
            self._ref[block] = 1
            self._since_s[block] = self.now
        return blocks

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is here, sealed and not in flight. Changes nothing."""
        blocks: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None or block in self._in_flight:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of the sealed blocks, as `match` found them."""
        for block in blocks:
            assert self._hash[block] is not None, f"block {block} is not sealed"
            assert block not in self._in_flight, f"block {block} is in flight"
            if not self._ref[block]:
                del self._cached[block]
                self._since_s[block] = self.now
            self._ref[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a table: from its end, so that leaves are evicted before their parents.

        A block still pinned settles when its last pin goes.
        """
        for block in reversed(blocks):
            assert self._ref[block] > 0, f"block {block} has no owner"
            self._ref[block] -= 1
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

    # ---- names ----

    def seal(self, block: int, name: BlockHash) -> bool:
        """Name a full block whose KV is complete. False: another block has the name, and this one stays unnamed.

        A block that bears the name already stays as it is.
        """
        assert self._ref[block] > 0, f"block {block} has no owner"
        assert not self._writer[block], f"block {block} is being written"
        if self._hash[block] is not None:
            assert self._hash[block] == name, f"block {block} has another name"
            return True
        if name in self._block_of:
            return False
        self._hash[block] = name
        self._block_of[name] = block
        if self._events is not None:
            self._events[name] = True
        return True

    def take_events(self) -> BlockEvents:
        """What entered and left the prefix cache since the last call; the first call lists all that is in it."""
        events = dict.fromkeys(self._block_of, True) if self._events is None else self._events
        self._events = {}
        return BlockEvents(
            stored=[name for name, stored in events.items() if stored],
            removed=[name for name, stored in events.items() if not stored],
        )

    # ---- pins, for the time of a gather, or from a grant until all has landed ----

    def pin_read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._ref[block] > 0, f"block {block} has no owner"
            assert not self._writer[block], f"block {block} is being written"
            self._readers[block] += 1
            self._take_off(block)

    def unpin_read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._readers[block] > 0, f"block {block} has no reader"
            self._readers[block] -= 1
            self._settle(block)

    def pin_write(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._ref[block] == 1, f"block {block} has {self._ref[block]} owners"
            assert self._hash[block] is None, f"block {block} is sealed"
            assert not self._readers[block], f"block {block} is being read"
            assert not self._writer[block], f"block {block} is being written"
            self._writer[block] = 1
            self._take_off(block)

    def unpin_write(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._writer[block], f"block {block} has no writer"
            self._writer[block] = 0
            self._settle(block)

    # ---- inside ----

    def _take_off(self, block: int) -> None:
        """A pin came."""
        if block not in self._in_flight:
            self._in_flight.add(block)
            self._since_s[block] = self.now

    def _settle(self, block: int) -> None:
        """File the block where its state says, after a reference or a pin went."""
        if self._readers[block] or self._writer[block]:
            return
        if self._ref[block] and block not in self._in_flight:
            return  # others own it still
        self._in_flight.discard(block)
        self._since_s[block] = self.now
        if self._ref[block]:
            return
        if self._hash[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        name = self._hash[block]
        assert name is not None
        self._hash[block] = None
        del self._block_of[name]
        if self._events is not None:
            self._events[name] = False
        return block

    def check_integrity(
        self,
        owned: Iterable[Sequence[int]],
        read: Iterable[Sequence[int]] = (),
        written: Iterable[Sequence[int]] = (),
    ) -> None:
        """Assert that every counter equals a recount from all block tables, leases and open pins (of blocks, each as
        often as it is pinned), and that every block is filed in exactly one place."""
        owners, pins_r, pins_w = (Counter(itertools.chain.from_iterable(all_)) for all_ in (owned, read, written))
        filed = Counter([*self._free, *self._cached])
        assert not owners[NULL_BLOCK], "the null block is owned"
        assert self._hash[NULL_BLOCK] is None, "the null block is sealed"
        for block in range(1, len(self._ref)):
            held = (self._ref[block], self._readers[block], self._writer[block])
            assert held == (owners[block], pins_r[block], pins_w[block]), f"block {block}: {held} is not the recount"
            self._check_block(block, filed[block])
        assert NULL_BLOCK not in filed, "the null block is free"
        assert sum(self.counts_by_state().values()) == self.num_total
        assert {name: block for block, name in enumerate(self._hash) if name is not None} == self._block_of

    def _check_block(self, block: int, times_filed: int) -> None:
        state = self.state(block)
        assert (state is BlockState.IN_FLIGHT) == (block in self._in_flight), f"block {block} is {state.name}"
        assert (state is BlockState.CACHED) == (block in self._cached), f"block {block} is {state.name}"
        assert times_filed == (state in (BlockState.FREE, BlockState.CACHED)), f"block {block} is filed {times_filed} x"
        if self._writer[block]:
            # A writer whose owner has let go finishes alone; nobody can come to share the block meanwhile.
            assert self._ref[block] <= 1, f"block {block} is shared and written"
            assert not self._readers[block], f"block {block} is read and written"
            assert self._hash[block] is None, f"block {block} is sealed and written"
