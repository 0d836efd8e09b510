"""What travels: a part is pieces of some blocks, in one message with a header and a tag of its own.

    0                            num_blocks * piece_bytes, rounded up to 8
    | piece | piece | ...        | checksum of each piece, if asked for |

A piece is a block, or the same range of layers of each block. `plan_parts` says which parts a request has: both sides
derive them from numbers that both know. The header repeats what the tag and the plan say already, since transports
match by tag alone and check nothing.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import LayoutMismatch, TransferError
from baton.layout import KvLayout, layer_groups_of
from kv_transfer.transport import MAX_HEADER_BYTES, TAG_BITS

HEADER_BYTES = 64

PART_BITS = 23
LEASE_BITS = TAG_BITS - PART_BITS

_MAGIC = b"BTNP"
_VERSION = 3
_FIELDS = struct.Struct("<4sHHQIIQ16sII4x")
"""magic, version, flags, lease, part, blocks, payload bytes, layout digest, first byte and bytes of each block."""
_CRC = struct.Struct("<I")
assert _FIELDS.size + _CRC.size == HEADER_BYTES <= MAX_HEADER_BYTES

_DRAIN = 1
_CHECKED = 2

CHECKSUM_BYTES = 8
MAX_PIECES = 4096
"""In one part, so that a slot has room for their checksums."""


def tag_of(lease: int, part: int) -> int:
    """The tag of a part. Leases are serials of the receiving node, so no two senders ever share a tag there.

    Raises TransferError for a lease of 2**39 or more, or a part of 2**23 or more.
    """
    if not 0 <= lease < 1 << LEASE_BITS or not 0 <= part < 1 << PART_BITS:
        raise TransferError(f"lease {lease}, part {part}: beyond {LEASE_BITS} and {PART_BITS} bits")
    return lease << PART_BITS | part


def untag(tag: int) -> tuple[int, int]:
    """(lease, part) of a tag."""
    return tag >> PART_BITS, tag & ((1 << PART_BITS) - 1)


def slot_bytes_for(part_blocks: int, block_bytes: int) -> int:
    """Bytes of a slot that holds parts of `part_blocks` blocks, with checksums."""
    return part_blocks * block_bytes + MAX_PIECES * CHECKSUM_BYTES


def part_blocks_for(slot_bytes: int, block_bytes: int) -> int:
    """Blocks that fit into a slot."""
    return max(0, slot_bytes - MAX_PIECES * CHECKSUM_BYTES) // block_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """What a part carries: of each block [first, first + num_blocks) of a request's table the bytes [offset, offset +
    num_bytes), which are those of layers below `end_layer`."""

    first: int
    num_blocks: int
    offset: int
    num_bytes: int
    end_layer: int


def plan_parts(
    layout: KvLayout, part_blocks: int, first: int, end: int, grouped_from: int = 0, num_groups: int = 1
) -> tuple[Piece, ...]:
    """The parts of blocks [first, end) of a request's table, in the order in which they are sent: whole blocks, up to
    `part_blocks` at a time; those from `grouped_from` on by groups of layers, all blocks of the first group before any
    of the next. Each part has at most the bytes of `part_blocks` blocks."""
    if num_groups == 1 or layout.block_bytes % layout.num_layers:
        grouped_from = end
    cut = min(max(first, grouped_from), end)
    whole, layer_bytes = layout.block_bytes, layout.block_bytes // layout.num_layers
    pieces = _pieces(first, cut, min(part_blocks, MAX_PIECES), 0, whole, layout.num_layers)
    for start_layer, end_layer in layer_groups_of(layout.num_layers, num_groups) if cut < end else ():
        offset, num_bytes = start_layer * layer_bytes, (end_layer - start_layer) * layer_bytes
        most = min(part_blocks * whole // num_bytes, MAX_PIECES)
        pieces += _pieces(cut, end, most, offset, num_bytes, end_layer)
    return tuple(pieces)


def _pieces(first: int, end: int, most: int, offset: int, num_bytes: int, end_layer: int) -> list[Piece]:
    return [Piece(at, min(most, end - at), offset, num_bytes, end_layer) for at in range(first, end, most)]


class PartHeader(NamedTuple):
    """`offset` and `piece_bytes`: the bytes of each block that it carries. `checked`: with checksums. `drain`: the part
    carries nothing; the sender has no use for the credit."""

    lease: int
    part: int
    num_blocks: int
    offset: int
    piece_bytes: int
    layout_digest: bytes
    checked: bool = False
    drain: bool = False

    @property
    def payload_bytes(self) -> int:
        return self.num_blocks * self.piece_bytes

    @property
    def checksums_at(self) -> int:
        """Where the checksums begin: aligned to their size."""
        return -(-self.payload_bytes // CHECKSUM_BYTES) * CHECKSUM_BYTES

    @property
    def message_bytes(self) -> int:
        """What the transport moves beside this header; of a drained part one byte, since none is no message."""
        if self.drain:
            return 1
        return self.checksums_at + self.num_blocks * CHECKSUM_BYTES if self.checked else self.payload_bytes

    def pack(self) -> bytes:
        """64 bytes, the last four a checksum."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            _DRAIN * self.drain | _CHECKED * self.checked,
            self.lease,
            self.part,
            self.num_blocks,
            self.payload_bytes,
            self.layout_digest,
            self.offset,
            self.piece_bytes,
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
        _, version, flags, lease, part, num_blocks, payload_bytes, digest, offset, piece_bytes = _FIELDS.unpack(fields)
        if version != _VERSION:
            raise TransferError(f"KV part of version {version}, not {_VERSION}")
        if payload_bytes != num_blocks * piece_bytes:
            raise TransferError(f"KV part of {payload_bytes} bytes, not {num_blocks} x {piece_bytes}")
        return cls(
            lease, part, num_blocks, offset, piece_bytes, digest, bool(flags & _CHECKED), bool(flags & _DRAIN)
        )  # fmt: skip

    def require(
        self, lease: int, part: int, num_blocks: int, offset: int, piece_bytes: int, layout_digest: bytes
    ) -> None:
        """Raise TransferError unless this heads exactly that part, and LayoutMismatch for blocks of another layout."""
        if self.layout_digest != layout_digest:
            raise LayoutMismatch(f"part {part} of lease {lease} has blocks of another layout", "layout_digest")
        wanted = (lease, part, num_blocks, offset, piece_bytes, False)
        found = (self.lease, self.part, self.num_blocks, self.offset, self.piece_bytes, self.drain)
        if found != wanted:
            raise TransferError(f"(lease, part, blocks, first byte, bytes, drain) {found}, expected {wanted}")
