"""Carries parts between the nodes of a fleet in virtual time: no bytes, but the time that they take.

A message takes the bandwidth of both of its ends, all of it: it begins when its receive is posted and both ends are
done with those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.clock import VirtualClock
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.transport import CONNECT_S, Arrived, Listener, OperationEvent, Sent, TransportEvent


@dataclass(frozen=True, slots=True)
class _Push:
    source: FleetTransport
    peer: str
    slot: int
    num_bytes: int
    header: bytes


@dataclass(frozen=True, slots=True)
class _Expect:
    peer: str
    slot: int


class FleetTransport:
    """A `Transport` among those of one `hub`, a dictionary by address. The nodes of a fleet do not fail, so neither
    does a transfer."""

    def __init__(
        self,
        name: str,
        hub: dict[str, FleetTransport],
        clock: VirtualClock,
        bytes_per_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._name = name
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._wake = wake
        self._hub = hub
        self._links: dict[str, str] = {}  # peer -> address
        self._free_from = 0.0  # when the last message has left, or has come
        self._pushes: dict[int, _Push] = {}  # by tag: to here, without a receive
        self._expects: dict[int, _Expect] = {}
        self._events: list[TransportEvent] = []
        self._listener: Listener | None = None
        hub[name] = self

    @property
    def wake(self) -> Callable[[], None]:
        return self._wake

    def subscribe(self, listener: Listener) -> None:
        self._listener = listener

    def info(self) -> bytes:
        return self._name.encode()

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        self._links[peer] = address.decode()

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        return None

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        target = self._hub[self._links[peer]]
        target._meet(tag, push=_Push(self, peer, slot, num_bytes, header))

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._meet(tag, expect=_Expect(peer, slot))

    def _meet(self, tag: int, push: _Push | None = None, expect: _Expect | None = None) -> None:
        push, expect = push or self._pushes.pop(tag, None), expect or self._expects.pop(tag, None)
        if push is None and expect is not None:
            self._expects[tag] = expect
        elif push is not None and expect is None:
            self._pushes[tag] = push
        elif push is not None and expect is not None:
            begins = max(self._clock.now(), self._free_from, push.source._free_from)
            ends = begins + push.num_bytes / self._bytes_per_s
            self._free_from = push.source._free_from = ends
            self._clock.at(ends, partial(self._arrived, tag, push, expect))

    def _arrived(self, tag: int, push: _Push, expect: _Expect) -> None:
        self._tell(Arrived(expect.peer, tag, expect.slot, push.header))
        push.source._tell(Sent(push.peer, tag, push.slot))

    def _tell(self, event: OperationEvent) -> None:
        if self._listener is not None:
            self._listener([event])
        else:
            self._events.append(event)
            self._wake()

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def relax(self, relaxed: bool) -> None:
        """Nothing to do: no thread waits for events."""

    def disconnect(self, peer: str) -> None:
        self._links.pop(peer, None)

    def close(self) -> None:
        """Nothing runs here."""
