"""Completion flags: how the stores of a part signal their end to the receiver on the same host, without a thread.

For each memory that its slots have had, the receiver has a *flag*, 8 bytes of host memory that its peers map. A sender
has the part's number written to the flag behind the last store, by its GPU in the stream's order, so that whoever reads
the number finds the bytes. No other part has that number, and a sender that was cut off has the flag of memory that is
retired (`Staging.renew`): what an earlier or a late part leaves in a flag says nothing about the awaited one.

A flag is sooner than the message END over TCP, which comes all the same. Where there are no flags, END is enough.
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
"""Stays 0 and belongs to no memory: a peer tries there whether it can write."""


def number_of(tag: int) -> int:
    """What says that the part of that tag is there; no tag is pushed twice to one process. 0 is nobody's."""
    return tag + 1


def open_flags(region: bytes) -> Tensor:
    """Another process's, mapped: [num_flags * FLAG_BYTES], uint8. Raises TransferError."""
    memory = HostMemory().open(region)
    if len(memory) % FLAG_BYTES:
        raise TransferError(f"{len(memory)} bytes are no flags")
    return memory


def _flags_of(memory: Tensor) -> memoryview:
    """uint8 as flags, each of which is read and written at once. The view keeps the memory."""
    return memory.numpy().data.cast("B").cast("Q")


class CompletionFlags:
    """A receiver's. `region`: for a `FlagWriter` elsewhere."""

    def __init__(self, num_flags: int = mmap.PAGESIZE // FLAG_BYTES) -> None:
        memory = shared_empty(num_flags * FLAG_BYTES)
        self.region, _ = HostMemory().export(memory)
        self._flags = _flags_of(memory)
        self._free = iter(range(NO_FLAG + 1, num_flags))

    def take(self) -> int:
        """A flag, from now on one memory's; NO_FLAG: there is none left."""
        return next(self._free, NO_FLAG)

    def is_signalled(self, flag: int, tag: int) -> bool:
        """Whether the part of that tag, which went into the flag's memory, is there."""
        return self._flags[flag] == number_of(tag)


class FlagWriter(Protocol):
    """A peer's flags, mapped. `num_flags`: there are no others."""

    num_flags: int

    def signal(self, flag: int, number: int, stream: Any) -> None:
        """Write the number there once what is queued on that torch.cuda.Stream is done (None, on a CPU: now). On any
        thread; never raises."""

    def close(self) -> None:
        """All signals have been written. Raises TransferError."""


class HostFlagWriter:
    """For stores of this process's own."""

    def __init__(self, region: bytes) -> None:
        """Raises TransferError, also on processors that may let others see the number before the bytes."""
        if platform.machine() != "x86_64":
            raise TransferError(f"{platform.machine()} does not keep the order of stores")
        self._flags = _flags_of(open_flags(region))
        self.num_flags = len(self._flags)

    def signal(self, flag: int, number: int, stream: Any) -> None:
        self._flags[flag] = number

    def close(self) -> None:
        """The memory is unmapped with the last slot that may signal there."""
