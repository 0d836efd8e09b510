"""Host memory that other processes of the same host and user can map. It has no name in a file system, so nothing is
left behind: it is freed when no process maps it any more."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref

import torch
from torch import Tensor

from baton.errors import TransferError

_REGION = struct.Struct("<iiQQQ")
"""The owner's process id, its descriptor of the memory, the file's device and inode, and its size in bytes."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
REGION_BYTES = _REGION.size
CHUNK_BYTES = 4 << 20
"""Bytes per `HostCopy.advance`, which takes half a millisecond: the thread has other work too."""


class _Region(mmap.mmap):
    """Stays mapped as long as a tensor uses it. `fd`: the descriptor that other processes open."""

    fd: int


_regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
"""The regions that `shared_empty` made, by address."""


def shared_empty(num_bytes: int) -> Tensor:
    """[num_bytes], uint8, for `HostMemory`. Owns its memory, as torch.empty's does."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # processes that map it can rely on its length
        region = _Region(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    region.fd = fd
    weakref.finalize(region, os.close, fd)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    _regions[memory.data_ptr()] = region
    return memory


class HostMemory:
    """Exports slots made by `shared_empty` to other processes; maps and writes to theirs."""

    path = "shared memory"

    def start(self) -> None:
        pass

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """The region that contains the memory, for `open` in another process, and the offset in it. Raises
        TransferError when `shared_empty` did not make it."""
        address = memory.data_ptr()
        for start, region in list(_regions.items()):
            if start <= address < start + len(region):
                file = os.fstat(region.fd)
                name = _REGION.pack(os.getpid(), region.fd, file.st_dev, file.st_ino, len(region))
                return name, address - start
        raise TransferError("the slots are in memory of this process alone")

    def open(self, region: bytes) -> Tensor:
        """Map another process's region: [num_bytes], uint8. It is unmapped with the last tensor that uses it. Raises
        TransferError."""
        if len(region) != _REGION.size:
            raise TransferError(f"a region of memory is named by {_REGION.size} bytes, not {len(region)}")
        pid, number, *wanted = _REGION.unpack(region)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                file = os.fstat(fd)
                if [file.st_dev, file.st_ino, file.st_size] != wanted:
                    raise OSError("it is another file")
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or not file.st_size:
                    raise OSError("its length may change")  # a write beyond it would kill this process
                return torch.frombuffer(mmap.mmap(fd, file.st_size), dtype=torch.uint8)
            finally:
                os.close(fd)
        except OSError as error:
            reason = f"{error}; both must be of one user and see each other's processes, as in one container"
            raise TransferError(f"memory of process {pid} cannot be mapped: {reason}") from None

    def close(self, mapped: Tensor) -> None:
        """Nothing to do: the region is unmapped with its last tensor."""

    def copy(self, source: Tensor, target: Tensor) -> HostCopy:
        """Start a copy."""
        return HostCopy(source, target)


class HostCopy:
    """A copy that makes progress only in `advance`."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.error = ""
        self._source, self._target = source, target
        self._at = 0

    def advance(self) -> None:
        """Copy the next CHUNK_BYTES."""
        chunk = slice(self._at, self._at + CHUNK_BYTES)
        if not self.query():
            self._target[chunk].copy_(self._source[chunk])
            self._at = chunk.stop

    def cut(self) -> None:
        """End the copy now, as failed, unless it is complete."""
        if not self.query():
            self.error = "cut off"

    def query(self) -> bool:
        return bool(self.error) or self._at >= len(self._source)
