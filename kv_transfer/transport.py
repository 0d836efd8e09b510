"""What every transport does: bytes from one process's staging slot into another's, and nothing else.

    prefill node                                             decode node
                                                             expect(peer, tag, slot)     a receive is posted
    push(peer, tag, slot, header)
                            ==== bytes of the slot ====>     (matched by tag alone)
                            ---- header -------------->
    Sent                                                     Arrived(header)

A header goes from host memory to host memory, so that nobody looks into a GPU's to know what came.

A slot handed to `push` or `expect` is the transport's until exactly one event names it: Sent, Arrived or Failed. After
that event no network byte is written into, or read from, that slot's memory, whatever became of the peer. `Sent` says
that the slot may be reused, never that the bytes were delivered.

One transport serves one mover (a `KvSender` or a `KvReceiver`), since `poll` hands out each event once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.native import DONE, Native, Target

CONNECT_S = 5.0

TAG_BITS = 62
"""Tags are below 2**TAG_BITS; what is above belongs to the transports. No tag is pushed twice to one process."""

MAX_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True)
class Sent:
    """The slot's bytes were read for the last time."""

    peer: str
    tag: int
    slot: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The peer's message is in the slot, and `header` is what came with it. No transport checks a header, or tells the
    message's length."""

    peer: str
    tag: int
    slot: int
    header: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The message was not sent, or not received; `reason` is for a person."""

    peer: str
    tag: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The peer is gone, and no longer connected. Comes after the Failed of all operations with it, but for pushes that
    this process still stores to the peer for: each of them fails when its stores are over."""

    peer: str
    reason: str


OperationEvent = Sent | Arrived | Failed
TransportEvent = OperationEvent | PeerDisconnected
Listener = Callable[[list[OperationEvent]], None]


class Transport(Protocol):
    """One per process. All methods may be called from any thread; only `connect` and `close` block.

    `peer` names one incarnation of one process: it never comes back under the same name with another address.
    """

    @property
    def wake(self) -> Callable[[], None]:
        """What the transport calls, on any thread and with no lock held, when `poll` has something."""

    def subscribe(self, listener: Listener) -> None:
        """From now on the ends of operations go to `listener` and not to `poll`: as soon as they are there, on a thread
        of the transport's or within `poll`, some at a time, in their order, never two calls at once. It must not raise,
        nor wait for a thread that polls. Before the first operation; once."""

    def info(self) -> bytes:
        """The address of this transport, opaque, carrying its own checksum; peers pass it to `connect`."""

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        """Make `peer` reachable, `address` being what its `info` said. Both sides connect, in any order.

        Harmless when connected already. Raises TransferError for an address that is damaged, of an incompatible
        transport, or another than the peer is connected by, and when the peer cannot be reached within `timeout_s`.
        """

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> Target | None:
        """The peer's slot for that tag, if it has been granted by now for `num_bytes`, and can be reached. The caller
        stores in its first `num_bytes` what it would have in its own slot, and must call `push` as soon as that has
        begun, whatever became of the peer: nobody else uses the memory until it is over. None: `push` moves the bytes
        of the slot."""

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: Native = DONE) -> None:
        """Send the first `num_bytes` of a slot, one at least, and a header of MAX_HEADER_BYTES at most; waits for the
        peer's `expect` for as long as both live.

        storing: the caller's stores into what `acquire_remote_slot` gave for that tag. The message is sent when they
        are over, and no event names the slot before, unless the transport is closed."""

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        """Receive at most `num_bytes` into a slot. Called before the peer may push; a longer message is Failed."""

    def poll(self) -> list[TransportEvent]:
        """What happened since the last call, but for what a subscriber is told; that it has been told of by then, if it
        happened before. A PeerDisconnected stays for the next call only until the peer is connected anew. Raises
        RuntimeError when the transport itself has failed, of which `wake` told: then nothing works any more, and the
        process must end."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer: each operation with it still under way ends with Failed. No PeerDisconnected. Harmless when
        not connected. Whether the peer hears of it, as PeerDisconnected, is up to the transport: tell it otherwise
        too."""

    def close(self) -> None:
        """End all operations, with Failed, and all threads. Slots are untouched by the time it returns."""
