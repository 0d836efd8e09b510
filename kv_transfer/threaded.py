"""What transports have in common whose work is done by a thread of their own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.carrier import DONE, Native
from kv_transfer.transport import MAX_HEADER_BYTES, PeerLost, TransportEvent

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class TransportThread(Protocol):
    """All but `call` and `stop` are for the thread itself to run."""

    def call(self, command: Callable[[], None]) -> None: ...

    def stop(self, timeout_s: float) -> bool: ...

    @property
    def connect(self) -> Callable[..., None]:
        """With the peer, what its address says, and a future that is resolved once the peer can be reached."""

    def disconnect(self, peer: str) -> None: ...

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes) -> None: ...

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None: ...


class ThreadedTransport:
    """All of a `Transport` but `connect`. A subclass makes its thread, which emits into `_emit`, and calls `_begin`."""

    _thread: TransportThread
    _info: bytes

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._events: list[TransportEvent] = []
        self._events_lock = threading.Lock()

    def info(self) -> bytes:
        return self._info

    def place(self, peer: str, tag: int, num_bytes: int) -> Tensor | None:
        return None

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: Native = DONE) -> None:
        assert len(header) <= MAX_HEADER_BYTES
        assert storing is DONE, "nothing was placed"
        self._thread.call(partial(self._thread.push, peer, tag, slot, num_bytes, header))

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._thread.call(partial(self._thread.expect, peer, tag, slot, num_bytes))

    def poll(self) -> list[TransportEvent]:
        with self._events_lock:
            events, self._events = self._events, []
        return events

    def disconnect(self, peer: str) -> None:
        self._thread.call(partial(self._thread.disconnect, peer))

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._thread.stop(_CLOSE_S):
            log.error("transport thread did not end timeout_s=%g", _CLOSE_S)

    def _begin(self, thread: TransportThread, info: bytes) -> None:
        """The thread runs, and `info` is what others need to reach it."""
        self._thread, self._info = thread, info
        atexit.register(self.close)  # native libraries must not be torn down under a running thread

    def _connect(self, peer: str, timeout_s: float, *where: Any) -> None:
        """`where`: what the thread's `connect` is told beside the peer. Raises TransferError."""
        up: Future[None] = Future()
        self._thread.call(partial(self._open, peer, *where, up))
        try:
            up.result(max(0.0, timeout_s))
        except TimeoutError:
            self._thread.call(partial(self._give_up, peer, up))
            raise TransferError(f"{peer} cannot be reached within {timeout_s:.3g} s") from None

    def _open(self, peer: str, *where: Any) -> None:
        """An end of an earlier connection that nobody has heard of yet is not this one's."""
        with self._events_lock:
            self._events = [e for e in self._events if not (isinstance(e, PeerLost) and e.peer == peer)]
        self._thread.connect(peer, *where)

    def _give_up(self, peer: str, up: Future[None]) -> None:
        if not up.done():
            self._thread.disconnect(peer)

    def _emit(self, event: TransportEvent) -> None:
        with self._events_lock:
            self._events.append(event)


def resolve(up: Future[None], error: TransferError | None) -> None:
    """Tell who connects that the peer can be reached, or why not."""
    with contextlib.suppress(InvalidStateError):  # whoever waited has given up
        if error is None:
            up.set_result(None)
        else:
            up.set_exception(error)
