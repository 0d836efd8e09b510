"""Messages from one process to its forks: a ring in shared memory, and an eventfd for each reader.

A message is a number and an array of int32; one that is longer than a slot goes in several. The writer waits only when
the ring is full, which means that a reader is far behind.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_SLOTS = 128
SLOT_VALUES = 8 * 1024
FULL_TIMEOUT_S = 600.0
"""How long to wait for a reader that takes nothing. A process that died or hangs is noticed much earlier
(`node.ranks.ranks`)."""
_LINE = 16  # int32 values of a cache line
_HEADER = 3  # kind, number of values, whether the message goes on
_FITTING = SLOT_VALUES - _HEADER


class SharedRing:
    """Memory and eventfds that a process and its later forks share; freed when all of them have ended. `values`:
    int32, first a line for each reader, with the number of slots that it has taken, then the slots."""

    def __init__(self, num_readers: int) -> None:
        self._memory = mmap.mmap(-1, 4 * (num_readers * _LINE + NUM_SLOTS * SLOT_VALUES))
        self.values = memoryview(self._memory).cast("i")
        self.eventfds = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(num_readers)]

    def slot(self, number: int) -> memoryview:
        """The slot of part number `number`; parts are counted over all messages. [SLOT_VALUES] int32."""
        start = len(self.eventfds) * _LINE + number % NUM_SLOTS * SLOT_VALUES
        return self.values[start : start + SLOT_VALUES]

    def taken(self, reader: int) -> int:
        """How many parts it has taken, modulo 2**31."""
        return self.values[reader * _LINE]

    def take(self, reader: int) -> None:
        self.values[reader * _LINE] = (self.taken(reader) + 1) % 2**31


class RingWriter:
    """One thread only. timeout_s: how long `send` waits for a reader that takes nothing."""

    def __init__(self, ring: SharedRing, timeout_s: float = FULL_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._ring = ring
        self._written = 0

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        """Send a message to all readers. array: contiguous. Raises TimeoutError."""
        values = memoryview(array.reshape(-1).data)
        for start in range(0, max(1, len(values)), _FITTING):
            part = values[start : start + _FITTING]
            self._wait_for_room()
            slot = self._ring.slot(self._written)
            slot[0], slot[1], slot[2] = kind, len(part), int(start + _FITTING < len(values))
            slot[_HEADER : _HEADER + len(part)] = part
            self._written += 1
            for eventfd in self._ring.eventfds:
                os.eventfd_write(eventfd, 1)

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        readers = range(len(self._ring.eventfds))
        while any((self._written - self._ring.taken(reader)) % 2**31 >= NUM_SLOTS for reader in readers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank has taken no step for {self.timeout_s:g} s")
            time.sleep(1e-4)


class RingReader:
    """The end of the ring of the reader with that number. One thread only."""

    def __init__(self, ring: SharedRing, number: int) -> None:
        self._ring, self._number = ring, number

    def receive(self) -> tuple[int, NDArray[np.int32]]:
        """Wait for the next message."""
        import numpy as np

        data = bytearray()
        while True:
            os.eventfd_read(self._ring.eventfds[self._number])
            slot = self._ring.slot(self._ring.taken(self._number))
            kind, size, goes_on = slot[0], slot[1], slot[2]
            data += slot[_HEADER : _HEADER + size].cast("B")
            self._ring.take(self._number)
            if not goes_on:
                return kind, np.frombuffer(data, np.int32)
