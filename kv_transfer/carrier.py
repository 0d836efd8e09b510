"""What moves the bytes of a `PairTransport` once both ends have agreed on a message: CUDA IPC, NIXL, or NCCL.

All is called on the transport's thread, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from baton.errors import TransferError

Note = Callable[[bytes], None]
"""Sends the other end's `hear` something, ahead of what is sent next."""


class Native(Protocol):
    """An operation under way. Until `query` says True its memory is read or written."""

    @property
    def error(self) -> str:
        """Why it failed, once it is over; empty: it did not."""

    def query(self) -> bool:
        """Whether it is over. Never raises."""


class Done:
    """A `Native` that is over."""

    error = ""

    def query(self) -> bool:
        return True


DONE: Native = Done()


class OnDevice:
    """A `Native` that is over once a CUDA event has passed."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.error = ""

    def query(self) -> bool:
        try:
            return bool(self._event.query())
        except Exception as error:  # noqa: BLE001 - CUDA's errors: nothing runs on that device any more
            self.error = str(error)
            return True


def ring_nobody(stream: Any) -> None:
    """Where no bell can be had."""


def announce_nothing(header: bytes) -> None:
    """Where `push` is soon enough."""


class Target(NamedTuple):
    """A peer's slot, where this process stores what would be sent there.

    memory: [num_bytes or more], uint8, for kernels of this process's device. `ring` has the peer told that all is there
    once what is queued on that torch.cuda.Stream is done, or now (None, on a CPU): sooner than this process could
    notice it. It may be called, once, behind the last store and before that counts as over; it may come to nothing,
    never raises. `announce` has the peer told by the calling thread that the stores have begun, with the message's
    header: sooner than `push`, which wakes another. It may be called, once, before `push`; never raises.
    """

    memory: Tensor
    ring: Callable[[Any], None] = ring_nobody
    announce: Callable[[bytes], None] = announce_nothing

    @property
    def rings(self) -> bool:
        """Whether there is a bell."""
        return self.ring is not ring_nobody


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

    def place(self, memory: Tensor) -> bytes:
        """What the other end must know to send into a slot's memory, [slot_bytes], uint8. Raises TransferError."""

    def begin(self, memory: Tensor, num_bytes: int) -> Native | None:
        """The other end sends into the first bytes of that memory, in the order of these calls. None: it says when it
        is over, and this end has no part in it. Raises TransferError."""

    def has_come(self, memory: Tensor, tag: int) -> bool:
        """Whether the bell has rung for what goes into that memory under that tag, which has begun: all of it is there.
        False says nothing. Called again and again."""

    def hear(self, note: bytes) -> None:
        """Raises TransferError for a note that no such carrier sends."""

    def abort(self) -> None:
        """As for the pushing end."""

    def close(self) -> None: ...


class OneSidedReceiving:
    """All of a `Receiving` but `place`, where the other end does it all and says when it is over."""

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
