"""The interface of what moves the bytes of a `PairTransport` once both ends agree on a message: CUDA IPC, NIXL, NCCL.

All methods are called on the transport's thread, and none blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from baton.errors import TransferError
from kv_transfer.async_operation import AsyncOperation, RemoteSlot

if TYPE_CHECKING:
    from torch import Tensor

Note = Callable[[bytes], None]
"""Sends a note to the other end's `Receiving.handle_note`, ahead of the next message."""


class Sending(Protocol):
    """The pushing end of one connection."""

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> AsyncOperation:
        """Start to move the first bytes of a slot's memory, [slot_bytes], uint8, to `place`, which the other end
        exported. Raises TransferError: nothing was started."""

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot | None:
        """The first bytes of the peer's slot, granted for that tag, if kernels of this process can store to it. Raises
        TransferError."""

    def abort(self) -> None:
        """Make operations end soon, if that is possible without bytes that land late."""

    def close(self) -> None:
        """Called when all operations are over."""


class Receiving(Protocol):
    """The receiving end of one connection."""

    def export_slot(self, memory: Tensor) -> bytes:
        """The place that the other end needs to send into a slot's memory, [slot_bytes], uint8. Raises
        TransferError."""

    def begin(self, memory: Tensor, num_bytes: int) -> AsyncOperation | None:
        """The other end sends into the first bytes of that memory, in the order of these calls. None: this end does
        nothing, and the other reports when it is over. Raises TransferError."""

    def has_arrived(self, memory: Tensor, tag: int) -> bool:
        """Whether the completion flag shows that the message of that tag, which has begun, is all in that memory. False
        proves nothing. Polled."""

    def handle_note(self, note: bytes) -> None:
        """Handle a note. Raises TransferError for an invalid one."""

    def abort(self) -> None:
        """As `Sending.abort`."""

    def close(self) -> None: ...


class OneSidedReceiving:
    """All of a `Receiving` except `export_slot`, if the other end does the transfer and reports when it is over."""

    def begin(self, memory: Tensor, num_bytes: int) -> AsyncOperation | None:
        return None

    def has_arrived(self, memory: Tensor, tag: int) -> bool:
        return False

    def handle_note(self, note: bytes) -> None:
        raise TransferError("a one-sided carrier sends no notes")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Carrier(Protocol):
    """One per transport."""

    kind: str
    version: str
    """Must be equal at both ends."""
    memory: bytes
    """What the `sending` of peers needs of this process's memory before the first grant."""

    def start(self, name: str) -> None:
        """`name`: this process's name for its peers. Raises TransferError."""

    def sending(self, peer: str, memory: bytes, note: Note) -> Sending:
        """peer, memory: the other end's name and its carrier's `memory`. Raises TransferError if it is unreachable."""

    def receiving(self, peer: str, host: str) -> Receiving:
        """host: the other end's address."""

    def progress(self) -> None:
        """Called often while any operation is under way."""

    def close(self) -> None:
        """Start nothing on any slot from now on."""
