"""Which node's prefix cache holds which KV blocks, as the nodes publish it: one index over prefill and decode nodes.

    key of a block hash -> bit mask of the nodes that hold the block
    node                -> the keys of all that it stored, for the day when it is gone

A key is Python's own 64-bit hash of the block hash, SipHash with a secret of this process: a block takes half of the
memory that its 32 bytes would. Of 2^23 blocks two share a key once in 500,000 routers, and then a hint is wrong.

The hash of a block covers everything before it, so a node holds a prefix of a prompt as far as it holds the leading
blocks without a hole. Blocks before a hole may have been evicted while later ones are still there, therefore a lookup
follows the chain from its beginning, and ends where no node is left.

The index is a hint: it lags behind the nodes by up to a tenth of a second (`node.kv_feed`), and placement must work
without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.block_hash import BlockHash
from baton.errors import InvalidRequest
from baton.messages import KvEvents

MAX_BLOCKS_PER_NODE = 2**20
"""Whatever a node says of its pool."""
MAX_BLOCKS = 2**23
"""Different ones, of all nodes: 1 GB. Further blocks are not remembered."""
_MAX_SHARED_MASKS = 4096


@dataclass(slots=True)
class _Holder:
    """`bit`: the node's in the masks. `stored`: keys of all blocks that it holds, some several times, and of some that
    it has lost."""

    bit: int
    max_blocks: int
    num_blocks: int = 0
    stored: array[int] = field(default_factory=lambda: array("q"))
    next_sequence: int | None = None  # None: only a snapshot makes sense


class PrefixIndex:
    """Nodes are named by their incarnations. `max_blocks`: different blocks, of all nodes."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}  # one object for all equal masks
        self._holders: dict[str, _Holder] = {}
        self._nodes_of: dict[int, tuple[str, ...]] = {}  # by mask, as far as it was asked for

    # ---- what nodes publish ----

    def add(self, incarnation: str, num_blocks: int) -> None:
        """A node of so many blocks begins to publish: its first events are a snapshot. What is known of an earlier
        session with it is forgotten."""
        self.forget(incarnation)
        taken = sum(holder.bit for holder in self._holders.values())
        lowest_free = ~taken & (taken + 1)
        self._holders[incarnation] = _Holder(lowest_free, min(num_blocks, MAX_BLOCKS_PER_NODE))

    def forget(self, incarnation: str) -> None:
        """The node is gone, and holds nothing. Idempotent."""
        if holder := self._holders.pop(incarnation, None):
            self._clear(holder)
            self._nodes_of.clear()

    def apply(self, incarnation: str, events: KvEvents) -> None:
        """Take in events of a node that was added; those of any other are ignored. Beyond the node's own number of
        blocks, nothing is stored.

        Raises InvalidRequest if events are missing before these: the node then holds nothing until its next snapshot.
        """
        holder = self._holders.get(incarnation)
        if holder is None:
            return
        if not events.snapshot and events.sequence != holder.next_sequence:
            expected, holder.next_sequence = holder.next_sequence, None
            self._clear(holder)
            what = "a snapshot" if expected is None else str(expected)
            raise InvalidRequest(f"KV events: number {events.sequence} comes instead of {what}", "sequence")
        if events.snapshot:
            self._clear(holder)
        holder.next_sequence = events.sequence + 1
        self._remove(holder, map(hash, events.removed))
        self._store(holder, map(hash, events.stored))

    # ---- what is asked ----

    def held(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many leading blocks each node holds; nodes that hold none are left out."""
        found: dict[str, int] = {}
        alive = self._masks.get(hash(block_hashes[0]), 0) if block_hashes else 0
        if not alive:
            return found
        last: int | None = alive
        for num_held, mask in enumerate(map(self._masks.get, map(hash, block_hashes))):
            if mask is last:  # as for most neighbours: equal masks are one object
                continue
            last = mask
            if lost := alive & ~(mask or 0):
                found |= dict.fromkeys(self._nodes_in(lost), num_held)
                alive ^= lost
                if not alive:
                    return found
        return found | dict.fromkeys(self._nodes_in(alive), len(block_hashes))

    def num_blocks(self, incarnation: str) -> int:
        """How many blocks the node holds, as far as it is known here."""
        holder = self._holders.get(incarnation)
        return holder.num_blocks if holder else 0

    def __len__(self) -> int:
        """How many different blocks are held."""
        return len(self._masks)

    # ---- internal ----

    def _nodes_in(self, mask: int) -> tuple[str, ...]:
        """The nodes of a mask."""
        if mask not in self._nodes_of:
            if len(self._nodes_of) >= _MAX_SHARED_MASKS:
                self._nodes_of.clear()
            self._nodes_of[mask] = tuple(name for name, holder in self._holders.items() if holder.bit & mask)
        return self._nodes_of[mask]

    def _store(self, holder: _Holder, keys: Iterable[int]) -> None:
        masks, bit = self._masks, holder.bit
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit or holder.num_blocks >= holder.max_blocks or (not mask and len(masks) >= self._max_blocks):
                continue
            masks[key] = self._share(mask | bit)
            holder.num_blocks += 1
            holder.stored.append(key)
        if len(holder.stored) > 2 * holder.num_blocks + 1024:
            holder.stored = array("q", (key for key in dict.fromkeys(holder.stored) if masks.get(key, 0) & bit))

    def _remove(self, holder: _Holder, keys: Iterable[int]) -> None:
        masks, bit = self._masks, holder.bit
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                holder.num_blocks -= 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = self._share(mask ^ bit)

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, holder.stored)
        holder.stored = array("q")

    def _share(self, mask: int) -> int:
        """An equal number, of which there is mostly one object for all blocks."""
        if len(self._shared) >= _MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)
