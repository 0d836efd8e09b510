"""The carrier of simulated nodes: moves no bytes, but takes the time that they would take.

The connection, the grants and the headers are those of any `PairTransport`. All messages of a node share its bandwidth:
a message begins when the one before it has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.transports.pair.carrier import Note, OneSidedReceiving


class SimulatedCarrier:
    """Implements `Carrier`."""

    kind = "simulated"
    version = "1"
    memory = b""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_from = 0.0  # when the last message has left

    def start(self, name: str) -> None:
        pass

    def sending(self, peer: str, memory: bytes, note: Note) -> SimulatedSending:
        return SimulatedSending(self)

    def receiving(self, peer: str, host: str) -> SimulatedReceiving:
        return SimulatedReceiving()

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass

    def transfer(self, num_bytes: int) -> TimedOperation:
        """An operation that moves this many bytes, after all others of this node."""
        begins = max(self._clock(), self._free_from)
        self._free_from = begins + num_bytes / self._bytes_per_s
        return TimedOperation(self._free_from, self._clock)


class TimedOperation:
    """An `AsyncOperation` that is over at a given time."""

    error = ""

    def __init__(self, until: float, clock: Callable[[], float]) -> None:
        self._until = until
        self._clock = clock

    def query(self) -> bool:
        return self._clock() >= self._until


class SimulatedSending:
    """Implements `Sending`."""

    def __init__(self, carrier: SimulatedCarrier) -> None:
        self._carrier = carrier

    def send(self, memory: Any, num_bytes: int, place: bytes) -> AsyncOperation:
        return self._carrier.transfer(num_bytes)

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot | None:
        return None

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedReceiving(OneSidedReceiving):
    """Implements `Receiving`."""

    def export_slot(self, memory: Any) -> bytes:
        return b"-"
