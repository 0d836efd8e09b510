"""Which node's prefix cache holds which KV blocks, as the nodes publish it: one index over prefill and decode nodes.

    block -> bit mask of the nodes that hold it, by its place in a table (`router.placement.block_table`)
    node  -> the places of all that it stored, for the day when it is gone

The hash of a block covers everything before it, so a node holds a prefix of a prompt as far as it holds the leading
blocks without a hole. Blocks before a hole may have been evicted while later ones are still there, therefore a lookup
follows the chain from its beginning, and ends where no node is left.

The index is a hint: it lags behind the nodes by up to a tenth of a second (`node.kv_events.feed`), and placement must
work without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.block_hash import BlockHash
from baton.errors import InvalidRequest
from baton.messages import KvEvents
from router.placement.block_table import BlockTable, keys_of

MAX_BLOCKS_PER_NODE = 2**20
"""Whatever a node says of its pool."""
MAX_BLOCKS = 2**22
"""Different ones, of all nodes: 0.7 GB. Further blocks are not remembered."""
_MAX_NAMED_MASKS = 4096


@dataclass(slots=True)
class _Holder:
    """`bit`: the node's in the masks. `stored`: places of all blocks that it holds, some several times, and others."""

    bit: int
    max_blocks: int
    num_blocks: int = 0
    stored: array[int] = field(default_factory=lambda: array("I"))
    next_sequence: int | None = None  # None: only a snapshot makes sense


class PrefixIndex:
    """Nodes are named by their incarnations. `max_blocks`: different blocks, of all nodes."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._table = BlockTable()
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
        places = map(self._table.find, keys_of(events.removed))
        self._remove(holder, (place for place in places if place is not None))
        self._store(holder, keys_of(events.stored))

    # ---- what is asked ----

    def held(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many leading blocks each node holds; nodes that hold none are left out."""
        found: dict[str, int] = {}
        num_held, alive = 0, -1
        for number, mask in self._table.leading(block_hashes):
            if num_held and (lost := alive & ~mask):
                for name in self._nodes_in(lost):
                    found[name] = num_held
            alive &= mask
            if not alive:
                return found
            num_held += number
        return found | dict.fromkeys(self._nodes_in(alive), num_held) if num_held else found

    def num_blocks(self, incarnation: str) -> int:
        """How many blocks the node holds, as far as it is known here."""
        holder = self._holders.get(incarnation)
        return holder.num_blocks if holder else 0

    def __len__(self) -> int:
        """How many different blocks are held."""
        return len(self._table)

    # ---- internal ----

    def _nodes_in(self, mask: int) -> tuple[str, ...]:
        """The nodes of a mask."""
        if mask not in self._nodes_of:
            if len(self._nodes_of) >= _MAX_NAMED_MASKS:
                self._nodes_of.clear()
            self._nodes_of[mask] = tuple(name for name, holder in self._holders.items() if holder.bit & mask)
        return self._nodes_of[mask]

    def _store(self, holder: _Holder, keys: Iterable[int]) -> None:
        table, bit = self._table, holder.bit
        for key in keys:
            place = table.find(key)
            mask = 0 if place is None else table.mask(place)
            if mask & bit or holder.num_blocks >= holder.max_blocks or (not mask and len(table) >= self._max_blocks):
                continue
            if place is None:
                place = table.add(key)
            table.set_mask(place, mask | bit)
            holder.num_blocks += 1
            holder.stored.append(place)
        if len(holder.stored) > 2 * holder.num_blocks + 1024:
            holder.stored = array("I", (at for at in dict.fromkeys(holder.stored) if table.mask(at) & bit))

    def _remove(self, holder: _Holder, places: Iterable[int]) -> None:
        table, bit = self._table, holder.bit
        for place in places:
            mask = table.mask(place)
            if mask & bit:
                holder.num_blocks -= 1
                table.set_mask(place, mask ^ bit)

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, reversed(holder.stored))  # so that the next blocks get these places in their order
        holder.stored = array("I")
