"""What moves the bytes of a `PairTransport` once both ends have agreed on a message: CUDA IPC, NIXL, or NCCL.

All is called on the transport's thread, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.native import Native, Target

Note = Callable[[bytes], None]
"""Sends the other end's `hear` something, ahead of what is sent next."""


class Sending(Protocol):
    """The pushing end of one connection."""

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> Native:
        """Move the first bytes of a slot's memory, [slot_bytes], uint8, to `place`, which the other end named. Raises
        TransferError: nothing was begun."""

    def reach(self, place: bytes, num_bytes: int, tag: int) -> Target | None:
        """The first bytes of the slot's memory there, granted for that tag, if kernels of this process can store to it.
        Raises TransferError."""

    def abort(self) -> None:
        """Have all that is under way end soon, if that can be had without bytes that land late."""

    def close(self) -> None:
        """All operations are over."""


class Receiving(Protocol):
    """The receiving end of one connection."""

    def export_slot(self, memory: Tensor) -> bytes:
        """What the other end must know to send into a slot's memory, [slot_bytes], uint8. Raises TransferError."""

    def begin(self, memory: Tensor, num_bytes: int) -> Native | None:
        """The other end sends into the first bytes of that memory, in the order of these calls. None: it says when it
        is over, and this end has no part in it. Raises TransferError."""

    def has_come(self, memory: Tensor, tag: int) -> bool:
        """Whether the flag is set of what goes into that memory under that tag, which has begun: all of it is there.
        False says nothing. Called again and again."""

    def hear(self, note: bytes) -> None:
        """Raises TransferError for a note that no such carrier sends."""

    def abort(self) -> None:
        """As for the pushing end."""

    def close(self) -> None: ...


class OneSidedReceiving:
    """All of a `Receiving` but `export_slot`, where the other end does it all and says when it is over."""

    def begin(self, memory: Tensor, num_bytes: int) -> Native | None:
        return None

    def has_come(self, memory: Tensor, tag: int) -> bool:
        return False

    def hear(self, note: bytes) -> None:
        raise TransferError("a one-sided carrier sends no notes")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Carrier(Protocol):
    """One per transport."""

    kind: str
    version: str
    """Both ends' must be equal."""
    memory: bytes
    """What the `sending` of others is to know of this process's memory before anything is granted."""

    def start(self, name: str) -> None:
        """`name` is this process's for the others. Raises TransferError."""

    def sending(self, peer: str, memory: bytes, note: Note) -> Sending:
        """peer, memory: the other end's name and what its carrier says. Raises TransferError: nothing can go there."""

    def receiving(self, peer: str, host: str) -> Receiving:
        """host: the other end's address."""

    def progress(self) -> None:
        """Called often while something is under way with anybody."""

    def close(self) -> None:
        """Touch no slot from now on."""
