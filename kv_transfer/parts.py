"""What travels: a part is a header and some blocks' bytes, in one message with a tag of its own.

    0        64          256                                    256 + num_blocks * block_bytes
    | header | (nothing) | block | block | ...                  |

The header repeats what the tag and the grant say already, since transports match by tag alone and check nothing.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import ClassVar

from baton.errors import LayoutMismatch, TransferError
from baton.layout import KvLayout
from kv_transfer.transport import TAG_BITS

HEADER_BYTES = 64
PAYLOAD_OFFSET = 256
"""Keeps the payload aligned for the widest loads of a GPU."""

PART_BITS = 23
LEASE_BITS = TAG_BITS - PART_BITS

_MAGIC = b"BTNP"
_VERSION = 1
_FIELDS = struct.Struct("<4sHHQIIQ16s12x")  # magic, version, flags, lease, part, blocks, payload bytes, layout digest
_CRC = struct.Struct("<I")
assert _FIELDS.size + _CRC.size == HEADER_BYTES

_DRAIN = 1


def tag_of(lease: int, part: int) -> int:
    """The tag of a part. Leases are serials of the receiving node, so no two senders ever share a tag there.

    Raises TransferError for a lease of 2**40 or more, or a part of 2**23 or more.
    """
    if not 0 <= lease < 1 << LEASE_BITS or not 0 <= part < 1 << PART_BITS:
        raise TransferError(f"lease {lease}, part {part}: beyond {LEASE_BITS} and {PART_BITS} bits")
    return lease << PART_BITS | part


def untag(tag: int) -> tuple[int, int]:
    """(lease, part) of a tag."""
    return tag >> PART_BITS, tag & ((1 << PART_BITS) - 1)


def slot_bytes_for(part_blocks: int, block_bytes: int) -> int:
    """Bytes of a slot that holds parts of `part_blocks` blocks."""
    return PAYLOAD_OFFSET + part_blocks * block_bytes


def part_blocks_for(slot_bytes: int, block_bytes: int) -> int:
    """Blocks that fit into a slot."""
    return max(0, slot_bytes - PAYLOAD_OFFSET) // block_bytes


@dataclass(frozen=True, slots=True)
class PartHeader:
    """`drain`: the part carries nothing; the sender has no use for the credit."""

    lease: int
    part: int
    num_blocks: int
    payload_bytes: int
    layout_digest: bytes
    drain: bool = False

    SIZE: ClassVar[int] = HEADER_BYTES

    def pack(self) -> bytes:
        """64 bytes, the last four a checksum."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            _DRAIN if self.drain else 0,
            self.lease,
            self.part,
            self.num_blocks,
            self.payload_bytes,
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
        _, version, flags, lease, part, num_blocks, payload_bytes, digest = _FIELDS.unpack(fields)
        if version != _VERSION:
            raise TransferError(f"KV part of version {version}, not {_VERSION}")
        return cls(lease, part, num_blocks, payload_bytes, digest, bool(flags & _DRAIN))

    def require(self, lease: int, part: int, num_blocks: int, layout: KvLayout) -> None:
        """Raise TransferError unless this heads exactly that part, and LayoutMismatch for blocks of another layout."""
        if self.layout_digest != layout.digest():
            raise LayoutMismatch(f"part {part} of lease {lease} has blocks of another layout", "layout_digest")
        wanted = (lease, part, num_blocks, num_blocks * layout.block_bytes, False)
        found = (self.lease, self.part, self.num_blocks, self.payload_bytes, self.drain)
        if found != wanted:
            raise TransferError(f"(lease, part, blocks, bytes, drain) {found}, expected {wanted}")
