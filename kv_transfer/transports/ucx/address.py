"""The wire format of a UCX worker's address. UCX aborts the process when given a damaged one, so addresses are checked
first: here for transmission errors, in `form` for their structure. The format also includes the worker's machine, which
UCX does not report."""

from __future__ import annotations

import hashlib
import struct

from baton.errors import TransferError

Version = tuple[int, int, int]

_HEAD = struct.Struct("<4s3B16s16s")  # magic, UCX version, machine, checksum
_MAGIC = b"BTNU"


def pack_address(version: Version, machine: str, worker_address: bytes) -> bytes:
    """machine: as `host.boot_id` names it."""
    where = _digest(machine.encode())
    return _HEAD.pack(_MAGIC, *version, where, _checksum(version, where, worker_address)) + worker_address


def unpack_address(version: Version, machine: str, address: bytes, who: str) -> tuple[bytes, bool]:
    """The worker address that `pack_address` packed at `who`, and whether it is on this machine. Raises TransferError
    when it is damaged, or when the major or minor versions of UCX differ, since their wire formats may too."""
    if len(address) <= _HEAD.size or not address.startswith(_MAGIC):
        raise TransferError(f"what {who} sent is no UCX address")
    _, *numbers, where, checksum = _HEAD.unpack_from(address)
    theirs, worker_address = (numbers[0], numbers[1], numbers[2]), address[_HEAD.size :]
    if checksum != _checksum(theirs, where, worker_address):
        raise TransferError(f"the UCX address of {who} is damaged")
    if theirs[:2] != version[:2]:
        raise TransferError(f"UCX {_text(version)} != {_text(theirs)} of {who}")
    return worker_address, where == _digest(machine.encode())


def _checksum(version: Version, where: bytes, worker_address: bytes) -> bytes:
    return _digest(bytes(version) + where + worker_address)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def _text(version: Version) -> str:
    return ".".join(map(str, version))
