"""Operations that move bytes asynchronously, and peers' slots that this process may store into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class AsyncOperation(Protocol):
    """An operation that runs in the background. Its memory may be read or written until `query` returns True."""

    @property
    def error(self) -> str:
        """Why it failed, once it is over; empty if it succeeded."""

    def query(self) -> bool:
        """Whether it is over. Never raises."""


class Done:
    """An `AsyncOperation` that is already over."""

    error = ""

    def query(self) -> bool:
        return True


DONE: AsyncOperation = Done()


class CudaEventOperation:
    """An `AsyncOperation` that is over once a CUDA event has passed."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.error = ""

    def query(self) -> bool:
        try:
            return bool(self._event.query())
        except Exception as error:  # noqa: BLE001 - a CUDA error: nothing runs on that device any more
            self.error = str(error)
            return True


def no_signal(stream: Any) -> None:
    """A `RemoteSlot.signal` that does nothing, for peers without completion flags."""


def no_announce(header: bytes) -> None:
    """A `RemoteSlot.announce` that does nothing, for carriers with which `push` is early enough."""


class RemoteSlot(NamedTuple):
    """A peer's slot that this process stores into instead of sending its own.

    memory: [num_bytes or more], uint8, for kernels on this process's device. `signal` notifies the peer that all bytes
    are there, once the work queued on that torch.cuda.Stream is done, or now (None, on a CPU): earlier than this
    process could notice. Call it at most once, after the last store and before the stores count as over; it may have no
    effect, and never raises. `announce` notifies the peer, from the calling thread, that the stores have begun, with
    the message's header: earlier than `push`, which wakes another thread. Call it at most once, before `push`; it never
    raises.
    """

    memory: Tensor
    signal: Callable[[Any], None] = no_signal
    announce: Callable[[bytes], None] = no_announce

    @property
    def signals(self) -> bool:
        """Whether there is a completion flag."""
        return self.signal is not no_signal
