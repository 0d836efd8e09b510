"""How a UCX worker's address travels: UCX aborts the process when given a damaged one, so it is checked before."""

from __future__ import annotations

import hashlib
import struct

from baton.errors import TransferError

Version = tuple[int, int, int]

_HEAD = struct.Struct("<4s3Bx16s")  # magic, UCX version, checksum
_MAGIC = b"BTNU"


def pack_address(version: Version, worker_address: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, *version, _checksum(version, worker_address)) + worker_address


def unpack_address(version: Version, address: bytes, who: str) -> bytes:
    """The worker address in what `pack_address` made at `who`. Raises TransferError when it is damaged, or when that
    UCX has another major or minor version than this: their wire formats may differ."""
    if len(address) <= _HEAD.size or not address.startswith(_MAGIC):
        raise TransferError(f"what {who} sent is no UCX address")
    _, *numbers, checksum = _HEAD.unpack_from(address)
    theirs, worker_address = (numbers[0], numbers[1], numbers[2]), address[_HEAD.size :]
    if checksum != _checksum(theirs, worker_address):
        raise TransferError(f"the UCX address of {who} is damaged")
    if theirs[:2] != version[:2]:
        raise TransferError(f"UCX {_text(version)} != {_text(theirs)} of {who}")
    return worker_address


def _checksum(version: Version, worker_address: bytes) -> bytes:
    return hashlib.sha256(bytes(version) + worker_address).digest()[:16]


def _text(version: Version) -> str:
    return ".".join(map(str, version))
