"""The message format: a part is pieces of some blocks, in one message with a header and a tag of its own.

    0                            num_pieces * piece_bytes, rounded up to 8
    | piece | piece | ...        | checksum of each piece, with the part's tag, if asked for |

A part carries the same slice of each of its blocks, from one rank to another, in the order of blocks, then layers, K
before V, then heads. Of a block of a KV group it carries the group's layers that are in the slice, possibly none. A
piece is a range of a block that is contiguous at the sender. `PartPlanner` computes a request's parts; both sides
derive them from numbers that both know. If only one of the two pools is quantized, parts are quantized, and the side
with the other pool converts. The header repeats what the tag and the plan say, since transports match by tag alone and
check nothing.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.errors import LayoutMismatch, TransferError
from baton.layout import KvLayout, KvSlice, LayerKv, layer_groups_of
from kv_transfer.slices import RankPair, pair_ranks, rows_of
from kv_transfer.transport import MAX_HEADER_BYTES, TAG_BITS

HEADER_BYTES = 64

PART_BITS = 23
LEASE_BITS = TAG_BITS - PART_BITS

_MAGIC = b"BTNP"
_VERSION = 5
_FIELDS = struct.Struct("<4sHHQIIII4H16s4x")
"""magic, version, flags, lease, part, blocks, pieces, bytes per piece, layers and heads, layout digest."""
_CRC = struct.Struct("<I")
assert _FIELDS.size + _CRC.size == HEADER_BYTES <= MAX_HEADER_BYTES

_DRAIN = 1
_CHECKED = 2

CHECKSUM_BYTES = 8
MAX_PIECES = 4096
"""Limit per part, so that a slot has room for the checksums."""


def tag_of(lease: int, part: int) -> int:
    """The tag of a part. The receiving node numbers the leases, so no two senders ever share a tag there.

    Raises TransferError for a lease of 2**39 or more, or a part of 2**23 or more.
    """
    if not 0 <= lease < 1 << LEASE_BITS or not 0 <= part < 1 << PART_BITS:
        raise TransferError(f"lease {lease}, part {part}: beyond {LEASE_BITS} and {PART_BITS} bits")
    return lease << PART_BITS | part


def slot_bytes_for(part_blocks: int, block_bytes: int) -> int:
    """Bytes of a slot that holds parts of `part_blocks` blocks, with checksums."""
    return part_blocks * block_bytes + MAX_PIECES * CHECKSUM_BYTES


def part_blocks_for(slot_bytes: int, block_bytes: int) -> int:
    """Blocks that fit into a slot."""
    return max(0, slot_bytes - MAX_PIECES * CHECKSUM_BYTES) // block_bytes


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part as both sides plan it: from rank `source` to rank `target`, it carries `kv_slice`, `num_bytes` each, of
    the blocks [first, first + num_blocks) of those that travel for a request. layers: the model's layers in the form in
    which they are sent. groups: the KV group of each block; empty: there is one group. With several groups, `num_bytes`
    is that of the group with the most layers in the slice."""

    first: int
    num_blocks: int
    source: int
    target: int
    kv_slice: KvSlice
    num_bytes: int
    layers: tuple[LayerKv, ...] = field(repr=False)
    groups: tuple[int, ...] = ()

    @property
    def end_layer(self) -> int:
        """One more than the number of its last layer."""
        return self.kv_slice.layer_end


class _Round(NamedTuple):
    """Parts of up to `most` blocks, one for each pair of ranks: its slice, and the bytes of that slice per block."""

    most: int
    slices: tuple[tuple[KvSlice, int], ...]


class PartPlanner:
    """Plans the parts of requests between two nodes of compatible layouts. part_blocks: how many of a rank's blocks its
    slots hold, at the sender and at the receiver. Parts come in rounds of one part per pair of ranks, in the order of
    `pairs`, so a part's number alone identifies its pair. own: which of the two layouts is this node's."""

    def __init__(
        self, sender: KvLayout, receiver: KvLayout, part_blocks: tuple[int, int], own: KvLayout | None = None
    ) -> None:
        self.pairs = pair_ranks(sender, receiver)
        self._ends = tuple(zip((sender, receiver), part_blocks, strict=True))
        self._sent = sender.sent(receiver)
        # A node knows its own layers by identity.
        self._layers = own.layers if own and own.layers == self._sent.layers else self._sent.layers
        self._num_kv_groups = len(sender.layers_of_groups)
        self._rounds: dict[int, list[_Round]] = {}  # by number of groups

    def pair_of(self, part: int) -> RankPair:
        return self.pairs[part % len(self.pairs)]

    def plan(self, first: int, end: int, grouped_from: int = 0, num_groups: int = 1) -> tuple[PlannedPart, ...]:
        """The parts for the entries [first, end) of a request's block table, in the order of sending. A part has all
        layers of as many blocks as fit; from entry `grouped_from` on, parts go by layer groups, all blocks of one group
        before any of the next."""
        return self._plan(range(end), first, grouped_from, num_groups)

    def of_entries(self, entries: Sequence[int], grouped_from: int = 0, num_groups: int = 1) -> tuple[PlannedPart, ...]:
        """The parts for these (sorted) entries of a request's block table; from the entry `grouped_from` on by layer
        groups. A part's blocks are counted along `entries`."""
        return self._plan(entries, 0, bisect.bisect_left(entries, grouped_from), num_groups)

    def _plan(self, entries: Sequence[int], first: int, grouped_from: int, num_groups: int) -> tuple[PlannedPart, ...]:
        width, end = self._num_kv_groups, len(entries)
        groups = tuple(entry % width for entry in entries) if width > 1 else ()
        cut = end if num_groups == 1 else min(max(first, grouped_from), end)
        return tuple(self._parts(first, cut, 1, groups) + self._parts(cut, end, num_groups, groups))

    def _parts(self, first: int, end: int, num_groups: int, groups: tuple[int, ...]) -> list[PlannedPart]:
        return [
            PlannedPart(
                first=at,
                num_blocks=(n := min(most, end - at)),
                source=pair.source,
                target=pair.target,
                kv_slice=kv_slice,
                num_bytes=num_bytes,
                layers=self._layers,
                groups=groups[at : at + n],
            )
            for most, slices in self._rounds_of(num_groups)
            for at in range(first, end, most)
            for pair, (kv_slice, num_bytes) in zip(self.pairs, slices, strict=True)
        ]

    def _rounds_of(self, num_groups: int) -> list[_Round]:
        if (found := self._rounds.get(num_groups)) is None:
            groups = min(num_groups, *(pair.kv_slice.num_layers for pair in self.pairs))
            found = self._rounds[num_groups] = [self._round(index, groups) for index in range(groups)]
        return found

    def _round(self, group: int, num_groups: int) -> _Round:
        slices, most = [], MAX_PIECES
        for pair in self.pairs:
            start, end = layer_groups_of(pair.kv_slice.num_layers, num_groups)[group]
            at = pair.kv_slice.layer_start
            kv_slice = pair.kv_slice._replace(layer_start=at + start, layer_end=at + end)
            num_bytes = self._sent.num_bytes(kv_slice)
            for (layout, part_blocks), rank in zip(self._ends, (pair.source, pair.target), strict=True):
                fitting = part_blocks * layout.num_bytes(layout.ranks[rank]) // num_bytes
                most = min(most, fitting, MAX_PIECES // rows_of(layout, rank, kv_slice, self._sent).most)
            slices.append((kv_slice, num_bytes))
        return _Round(most, tuple(slices))


def _can_have_checksums(num_pieces: int, piece_bytes: int) -> bool:
    """Whether a slot has room for this many checksums, and they can be computed. A part without pieces has none."""
    return num_pieces == 0 or (num_pieces <= MAX_PIECES and piece_bytes > 0 and piece_bytes % CHECKSUM_BYTES == 0)


class Checksums(NamedTuple):
    """The checksums of a part are at byte `at` of its slot, each combined (XOR) with the part's tag, so that the bytes
    of another part, which came earlier or in place of this one, have wrong checksums."""

    at: int
    tag: int


class PartHeader(NamedTuple):
    """`kv_slice` of `num_blocks` blocks, as `num_pieces` pieces of `piece_bytes`. `checked`: with checksums.
    `drain`: the part is empty, since the sender does not need the credit."""

    lease: int
    part: int
    num_blocks: int
    kv_slice: KvSlice
    num_pieces: int
    piece_bytes: int
    layout_digest: bytes
    checked: bool = False
    drain: bool = False

    @property
    def payload_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes

    @property
    def checksums(self) -> Checksums | None:
        """Where its checksums are; None: it has none."""
        return Checksums(self._checksums_at, tag_of(self.lease, self.part)) if self.checked else None

    @property
    def _checksums_at(self) -> int:
        """The offset of the checksums, aligned to their size."""
        return -(-self.payload_bytes // CHECKSUM_BYTES) * CHECKSUM_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes that the transport moves besides this header. At least one, since messages cannot be empty, even for a
        drained part and for one whose blocks have no layer in the slice."""
        return max(1, self._checksums_at + self.num_pieces * CHECKSUM_BYTES if self.checked else self.payload_bytes)

    def pack(self) -> bytes:
        """64 bytes, of which the last four are a checksum."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            _DRAIN * self.drain | _CHECKED * self.checked,
            self.lease,
            self.part,
            self.num_blocks,
            self.num_pieces,
            self.piece_bytes,
            *self.kv_slice,
            self.layout_digest,
        )
        return fields + _CRC.pack(zlib.crc32(fields))

    @classmethod
    def parse(cls, data: bytes) -> PartHeader:
        """Raises TransferError for anything that `pack` of this version did not make."""
        if len(data) != HEADER_BYTES or not data.startswith(_MAGIC):
            raise TransferError("not a KV part")
        fields, (crc,) = data[: _FIELDS.size], _CRC.unpack(data[_FIELDS.size :])
        if zlib.crc32(fields) != crc:
            raise TransferError("a KV part's header is damaged")
        _, version, flags, lease, part, num_blocks, num_pieces, piece_bytes, *kv_slice, digest = _FIELDS.unpack(fields)
        if version != _VERSION:
            raise TransferError(f"KV part of version {version}, not {_VERSION}")
        if flags & _CHECKED and not _can_have_checksums(num_pieces, piece_bytes):
            raise TransferError(f"KV part of {num_pieces} pieces of {piece_bytes} bytes cannot have checksums")
        tag_of(lease, part)  # raises
        carried = num_blocks, KvSlice(*kv_slice), num_pieces, piece_bytes
        return cls(lease, part, *carried, digest, bool(flags & _CHECKED), bool(flags & _DRAIN))

    def require(
        self, lease: int, part: int, num_blocks: int, kv_slice: KvSlice, payload_bytes: int, layout_digest: bytes
    ) -> None:
        """Raise TransferError unless this is the header of exactly that part; LayoutMismatch for another layout."""
        if self.layout_digest != layout_digest:
            raise LayoutMismatch(f"part {part} of lease {lease} has blocks of another layout")
        wanted = (lease, part, num_blocks, kv_slice, payload_bytes, False)
        found = (self.lease, self.part, self.num_blocks, self.kv_slice, self.payload_bytes, self.drain)
        if found != wanted:
            raise TransferError(f"(lease, part, blocks, slice, bytes, drain) {found}, expected {wanted}")
