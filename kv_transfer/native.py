"""What moves bytes by itself: an operation under way, and a peer's slot that this process may store into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


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


def no_signal(stream: Any) -> None:
    """Where there are no completion flags."""


def no_announce(header: bytes) -> None:
    """Where `push` is soon enough."""


class Target(NamedTuple):
    """A peer's slot, where this process stores what would be sent there.

    memory: [num_bytes or more], uint8, for kernels of this process's device. `signal` has the peer told that all is
    there once what is queued on that torch.cuda.Stream is done, or now (None, on a CPU): sooner than this process could
    notice it. It may be called, once, behind the last store and before that counts as over; it may come to nothing,
    never raises. `announce` has the peer told by the calling thread that the stores have begun, with the message's
    header: sooner than `push`, which wakes another. It may be called, once, before `push`; never raises.
    """

    memory: Tensor
    signal: Callable[[Any], None] = no_signal
    announce: Callable[[bytes], None] = no_announce

    @property
    def signals(self) -> bool:
        """Whether there is a completion flag."""
        return self.signal is not no_signal
