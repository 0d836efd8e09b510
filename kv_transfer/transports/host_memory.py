"""Host memory that other processes of this host and user can map. It has no name that could be left behind: it is gone
with the last process that has it mapped."""

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
"""The process, its descriptor of the memory, which file that must be (device and inode), and its bytes."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
REGION_BYTES = _REGION.size
CHUNK_BYTES = 4 << 20
"""Copied at a time, half a millisecond: the thread has other work too."""


class _Region(mmap.mmap):
    """Mapped for as long as a tensor is made of it. `fd`: what others open."""

    fd: int


_regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
"""Those that `shared_empty` made, by address."""


def shared_empty(num_bytes: int) -> Tensor:
    """[num_bytes], uint8, for `HostMemory`. Owns its memory, as torch.empty's does."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # who maps it can rely on its length
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
    """How slots of `shared_empty` are named to other processes, and theirs are mapped and written to here."""

    path = "shared memory"

    def start(self) -> None:
        pass

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """The region that the memory lies in, for `open` elsewhere, and where there. Raises TransferError when it was
        not made by `shared_empty`."""
        address = memory.data_ptr()
        for start, region in list(_regions.items()):
            if start <= address < start + len(region):
                file = os.fstat(region.fd)
                name = _REGION.pack(os.getpid(), region.fd, file.st_dev, file.st_ino, len(region))
                return name, address - start
        raise TransferError("the slots are in memory of this process alone")

    def open(self, region: bytes) -> Tensor:
        """Map another process's region: [num_bytes], uint8. Unmapped with the last tensor that is made of it. Raises
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
                    raise OSError("its length may change")  # and to write beyond it would end this process
                return torch.frombuffer(mmap.mmap(fd, file.st_size), dtype=torch.uint8)
            finally:
                os.close(fd)
        except OSError as error:
            reason = f"{error}; both must be of one user and see each other's processes, as in one container"
            raise TransferError(f"memory of process {pid} cannot be mapped: {reason}") from None

    def close(self, mapped: Tensor) -> None:
        """Nobody uses it any more."""

    def copy(self, source: Tensor, target: Tensor) -> HostCopy:
        """Begin to copy."""
        return HostCopy(source, target)


class HostCopy:
    """A copy that is under way while `advance` is called."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.error = ""
        self._source, self._target = source, target
        self._at = 0

    def advance(self) -> None:
        """Copy a piece of it."""
        chunk = slice(self._at, self._at + CHUNK_BYTES)
        if not self.query():
            self._target[chunk].copy_(self._source[chunk])
            self._at = chunk.stop

    def cut(self) -> None:
        """Have it end now."""
        if not self.query():
            self.error = "cut off"

    def query(self) -> bool:
        return bool(self.error) or self._at >= len(self._source)
