"""A transport within one process, as strict as a real one. Tests use it and control when each message is delivered.

Like UCX it matches by tag alone, reads the sender's slot when the message is delivered (not when it is pushed), keeps a
push waiting until its receive is posted, and fails a message that is longer than its receive. If a matched message is
cut off, its memory is written to afterwards, as a real network may do.
"""

from __future__ import annotations

import functools
import itertools
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import TransferError
from baton_kernels.streams import side_stream
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.events import EventSource
from kv_transfer.staging import Staging
from kv_transfer.transport import (
    CONNECT_S,
    MAX_HEADER_BYTES,
    Arrived,
    Failed,
    PeerDisconnected,
    Sent,
    TransportEvent,
)

_CRC = struct.Struct("<I")
_LATE_BYTE = 0xEE


@dataclass(eq=False, slots=True)
class _Operation:
    """A push or a posted receive that is under way."""

    owner: MemoryTransport
    peer: str
    tag: int
    slot: int
    num_bytes: int
    target: str  # address of the transport that receives
    header: bytes = b""  # of a push
    matched: bool = False

    def fail(self, reason: str) -> None:
        if self.matched:
            late = self.owner.staging.memory(self.slot)
            self.owner.staging.renew(self.slot)
            late.fill_(_LATE_BYTE)
        self.owner._emit(Failed(self.peer, self.tag, self.slot, reason))


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """A push and its matching receive, whose bytes may move now."""

    push: _Operation
    receive: _Operation


class MemoryHub:
    """Connects memory transports. `pending` holds the transfers that a test may `deliver`, in any order; with `auto`
    each is delivered as soon as its push and its receive are both there."""

    def __init__(self, auto: bool = False) -> None:
        self.pending: list[Transfer] = []
        self._auto = auto
        self._lock = threading.RLock()
        self._transports: dict[str, MemoryTransport] = {}  # by address
        self._serial = itertools.count(1)
        self._waiting: dict[str, list[_Operation]] = {"push": [], "receive": []}
        self._touched: set[MemoryTransport] = set()

    @property
    def num_waiting_pushes(self) -> int:
        """How many pushes have no receive posted for them, by a peer that is still connected."""
        return sum(push.owner.address in self._links_of(push.target) for push in self._waiting["push"])

    def _links_of(self, address: str) -> Collection[str]:
        transport = self._transports.get(address)
        return transport.links.values() if transport is not None else ()

    def deliver(self, index: int = 0) -> None:
        """Move the bytes of `pending[index]`."""
        with self._turn():
            self._deliver(self.pending.pop(index))

    def deliver_all(self) -> None:
        while self.pending:
            self.deliver()

    def kill(self, name: str) -> None:
        """Cut off the newest transport of that name, as if its process had died: it sends and receives nothing more."""
        with self._turn():
            addresses = [a for a, t in self._transports.items() if t.name == name]
            if addresses:
                self._leave(self._transports[addresses[-1]], "the peer died")

    # ---- for the transports ----

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            yield
            touched, self._touched = self._touched, set()
        for transport in touched:
            transport._events.deliver()

    def _join(self, transport: MemoryTransport) -> str:
        with self._lock:
            address = f"{transport.name}/{next(self._serial)}"
            self._transports[address] = transport
            return address

    def _leave(self, transport: MemoryTransport, reason: str) -> None:
        if self._transports.pop(transport.address, None) is None:
            return
        for peer in list(transport.links):
            self._cut(transport, peer, reason, requested=False)

    def _add(self, kind: str, operation: _Operation) -> None:
        other = "receive" if kind == "push" else "push"
        for match in self._waiting[other]:
            if (match.target, match.tag) == (operation.target, operation.tag):
                self._waiting[other].remove(match)
                operation.matched = match.matched = True
                pair = (operation, match) if kind == "push" else (match, operation)
                self.pending.append(Transfer(*pair))
                if self._auto:
                    self._deliver(self.pending.pop())
                return
        self._waiting[kind].append(operation)

    def _deliver(self, transfer: Transfer) -> None:
        push, receive = transfer.push, transfer.receive
        if push.num_bytes > receive.num_bytes:
            receive.fail(f"message of {push.num_bytes} bytes, where {receive.num_bytes} were expected")
        else:
            source = push.owner.staging.memory(push.slot)[: push.num_bytes]
            _copy(source, receive.owner.staging.memory(receive.slot)[: push.num_bytes])
            receive.owner._emit(Arrived(receive.peer, receive.tag, receive.slot, push.header))
        push.owner._emit(Sent(push.peer, push.tag, push.slot))

    def _cut(self, transport: MemoryTransport, peer: str, reason: str, requested: bool) -> None:
        """Close the connection at both ends. `requested`: by this end, which gets no PeerDisconnected; the other end
        always gets one."""
        address = transport.links.pop(peer, None)
        if address is None:
            return
        self._fail_all(transport, peer, reason)
        if not requested:
            transport._emit(PeerDisconnected(peer, reason))
        other = self._transports.get(address)
        for theirs in [p for p, a in other.links.items() if a == transport.address] if other else []:
            assert other is not None
            self._cut(other, theirs, reason, requested=False)

    def _fail_all(self, transport: MemoryTransport, peer: str, reason: str) -> None:
        for operations in self._waiting.values():
            for operation in [o for o in operations if (o.owner, o.peer) == (transport, peer)]:
                operations.remove(operation)
                operation.fail(reason)
        for transfer in list(self.pending):
            for kind, mine, other in (
                ("receive", transfer.push, transfer.receive),
                ("push", transfer.receive, transfer.push),
            ):
                if (mine.owner, mine.peer) == (transport, peer):
                    self.pending.remove(transfer)
                    mine.fail(reason)
                    self._waiting[kind].append(other)


class MemoryTransport(EventSource):
    """A `Transport` over a hub. `wake` is called, without the hub's lock, when `poll` has something."""

    def __init__(self, hub: MemoryHub, name: str, staging: Staging, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.hub = hub
        self.name = name
        self.staging = staging
        self.links: dict[str, str] = {}  # peer -> address
        self.address = self.hub._join(self)

    def info(self) -> bytes:
        data = self.address.encode()
        return _CRC.pack(zlib.crc32(data)) + data

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        data = address[_CRC.size :]
        if address[: _CRC.size] != _CRC.pack(zlib.crc32(data)):
            raise TransferError(f"the address of {peer} is damaged")
        where = data.decode()
        with self.hub._turn():
            if self.address not in self.hub._transports:
                raise TransferError("the transport is closed")
            if self.links.get(peer, where) != where:
                raise TransferError(f"{peer} is connected at another address")
            if where not in self.hub._transports:
                raise TransferError(f"{peer} cannot be reached")
            if peer not in self.links:
                self._events.forget(peer)
                self.links[peer] = where

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        return None

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        assert len(header) <= MAX_HEADER_BYTES
        assert storing is DONE, "nothing was placed"
        with self.hub._turn():
            self._start("push", _Operation(self, peer, tag, slot, num_bytes, self.links.get(peer, ""), header))

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        with self.hub._turn():
            self._start("receive", _Operation(self, peer, tag, slot, num_bytes, self.address))

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def relax(self, relaxed: bool) -> None:
        """Nothing to do: no thread waits for events."""

    def disconnect(self, peer: str) -> None:
        with self.hub._turn():
            self.hub._cut(self, peer, "disconnected", requested=True)

    def close(self) -> None:
        with self.hub._turn():
            for peer in list(self.links):
                self.hub._cut(self, peer, "closed", requested=True)
            self.hub._leave(self, "closed")

    def _start(self, kind: str, operation: _Operation) -> None:
        if operation.peer in self.links:
            self.hub._add(kind, operation)
        else:
            operation.fail("not connected")

    def _emit(self, event: TransportEvent) -> None:
        self._events.put(event)
        self.hub._touched.add(self)


def _copy(source: Tensor, target: Tensor) -> None:
    """The copy is done when this returns, since the next copy runs on another stream. It does not wait for steps."""
    if target.device.type != "cuda":
        target.copy_(source)
        return
    stream = side_stream(target.device)
    with torch.cuda.stream(stream):
        target.copy_(source)
    stream.synchronize()


@functools.cache
def process_hub() -> MemoryHub:
    """The hub of this process."""
    return MemoryHub(auto=True)
