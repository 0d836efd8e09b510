"""Completion flags: how a part's stores signal their end to a receiver on the same host, without involving a thread.

For each memory that its slots have had, the receiver has a *flag*, 8 bytes of host memory that its peers map. The
sender's GPU writes the part's number to the flag after the last store, in stream order, so once the number is visible,
the bytes are too. No other part has that number, and a sender that was cut off only has the flag of retired memory
(`Staging.renew`), so what an earlier or late part leaves in a flag cannot be taken for the awaited one.

A flag is set earlier than the message END arrives over TCP, which is sent anyway. Without flags, END is enough.
"""

from __future__ import annotations

import mmap
import platform
from typing import Any, Protocol

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.transports.host_memory import HostMemory, shared_empty

FLAG_BYTES = 8
NO_FLAG = 0
"""The index of a flag that stays 0 and belongs to no memory: a peer writes there to test whether it can."""


def number_of(tag: int) -> int:
    """The flag value for the part of that tag; no tag is pushed twice to one process. 0 belongs to no part."""
    return tag + 1


def open_flags(region: bytes) -> Tensor:
    """Map another process's flags: [num_flags * FLAG_BYTES], uint8. Raises TransferError."""
    memory = HostMemory().open(region)
    if len(memory) % FLAG_BYTES:
        raise TransferError(f"{len(memory)} bytes are no flags")
    return memory


def _flags_of(memory: Tensor) -> memoryview:
    """A view of uint8 memory as flags, each read and written in one access. The view keeps the memory alive."""
    return memory.numpy().data.cast("B").cast("Q")


class CompletionFlags:
    """A receiver's flags. `region`: for a `FlagWriter` in another process."""

    def __init__(self, num_flags: int = mmap.PAGESIZE // FLAG_BYTES) -> None:
        memory = shared_empty(num_flags * FLAG_BYTES)
        self.region, _ = HostMemory().export(memory)
        self._flags = _flags_of(memory)
        self._free = iter(range(NO_FLAG + 1, num_flags))

    def take(self) -> int:
        """A flag for one memory, never reused; NO_FLAG: none is left."""
        return next(self._free, NO_FLAG)

    def is_signalled(self, flag: int, tag: int) -> bool:
        """Whether the part of that tag is all in the flag's memory."""
        return self._flags[flag] == number_of(tag)


class FlagWriter(Protocol):
    """A peer's flags, mapped: 0 to `num_flags` - 1."""

    num_flags: int

    def signal(self, flag: int, number: int, stream: Any) -> None:
        """Write the number there once the work queued on that torch.cuda.Stream is done (None, on a CPU: now). On any
        thread; never raises."""

    def close(self) -> None:
        """Called when all signals have been written. Raises TransferError."""


class HostFlagWriter:
    """A `FlagWriter` for stores by this process's CPU."""

    def __init__(self, region: bytes) -> None:
        """Raises TransferError, also on processors that may make the number visible before the bytes."""
        if platform.machine() != "x86_64":
            raise TransferError(f"{platform.machine()} does not keep the order of stores")
        self._flags = _flags_of(open_flags(region))
        self.num_flags = len(self._flags)

    def signal(self, flag: int, number: int, stream: Any) -> None:
        self._flags[flag] = number

    def close(self) -> None:
        """Nothing to do: the flags are unmapped with the last reference to this writer."""
