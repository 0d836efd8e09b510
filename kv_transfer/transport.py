"""The interface of all transports: they move bytes from one process's staging slot into another's.

    prefill node                                             decode node
                                                             expect(peer, tag, slot)     a receive is posted
    push(peer, tag, slot, header)
                            ==== bytes of the slot ====>     (matched by tag alone)
                            ---- header -------------->
    Sent                                                     Arrived(header)

A header travels from host memory to host memory, so no GPU memory is read to identify a message.

A slot passed to `push` or `expect` belongs to the transport until exactly one event names it: Sent, Arrived or Failed.
After that event no network byte is written into, or read from, that slot's memory, whatever happens to the peer. `Sent`
means that the slot may be reused, not that the bytes were delivered.

One transport serves one mover (a `KvSender` or a `KvReceiver`), since `poll` returns each event once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot

CONNECT_S = 5.0

TAG_BITS = 62
"""Tags are below 2**TAG_BITS; transports use the bits above. No tag is pushed twice to one process."""

MAX_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True)
class Sent:
    """The slot's bytes will not be read any more."""

    peer: str
    tag: int
    slot: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """The peer's message is in the slot, and `header` came with it. No transport checks a header, or reports the
    message's length."""

    peer: str
    tag: int
    slot: int
    header: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The message was not sent, or not received; `reason` is for people."""

    peer: str
    tag: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The peer is gone and no longer connected. Follows the Failed of all operations with it, except pushes whose
    stores into the peer's memory are still under way: each of those fails when its stores are over."""

    peer: str
    reason: str


OperationEvent = Sent | Arrived | Failed
TransportEvent = OperationEvent | PeerDisconnected
Listener = Callable[[list[OperationEvent]], None]


class Transport(Protocol):
    """One per mover. All methods may be called from any thread; only `connect` and `close` block.

    `peer` names one incarnation of one process: it never returns under the same name with another address.
    """

    @property
    def wake(self) -> Callable[[], None]:
        """Called by the transport, on any thread and with no lock held, when `poll` has something."""

    def subscribe(self, listener: Listener) -> None:
        """From now on pass operation events to `listener` instead of `poll`: as soon as they occur, on a thread of the
        transport or within `poll`, in batches, in order, never in two calls at once. It must not raise, nor wait for a
        thread that polls. Call once, before the first operation."""

    def info(self) -> bytes:
        """The opaque address of this transport, including a checksum; peers pass it to `connect`."""

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        """Make `peer` reachable at `address`, which its `info` returned. Both sides connect, in any order.

        Harmless when already connected. Raises TransferError for an address that is damaged, of an incompatible
        transport, or different from the one already connected, and when the peer cannot be reached within `timeout_s`.
        """

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        """The peer's slot for that tag, if it is already granted for `num_bytes` and this process can store into it.
        The caller stores the message into its first `num_bytes` instead of its own slot, and must call `push` as soon
        as the stores have begun, whatever happens to the peer: the memory is not reused until they are over. None:
        `push` sends the caller's slot."""

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        """Send the first `num_bytes` of a slot, at least one, and a header of at most MAX_HEADER_BYTES. The push stays
        pending until the peer's `expect`, for as long as both live.

        storing: the caller's stores into the result of `acquire_remote_slot` for that tag. The message counts as sent
        when they are over, and no event names the slot before, unless the transport is closed."""

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        """Receive at most `num_bytes` into a slot. Call before the peer may push; a longer message is Failed."""

    def poll(self) -> list[TransportEvent]:
        """Events since the last call, except those for a subscriber, which has received all earlier ones by then. A
        PeerDisconnected is dropped if the peer is reconnected before the next call. Raises RuntimeError when the
        transport itself has failed, after calling `wake`: then nothing works any more, and the process must end."""

    def batched(self) -> AbstractContextManager[None]:
        """A context: calls within it may take effect only at its end, and cost the caller less."""

    def relax(self, relaxed: bool) -> None:
        """Set whether events may come some 0.3 ms later than they could, which leaves the interpreter to threads that
        compute. Initially they may not."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer: each operation with it still under way ends with Failed. No PeerDisconnected. Harmless when
        not connected. Not every transport reports it to the peer (as PeerDisconnected), so notify the peer by other
        means too."""

    def close(self) -> None:
        """End all operations, with Failed, and all threads. Nothing touches the slots after it returns."""
