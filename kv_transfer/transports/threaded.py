"""Common base of the transports that do their work on a thread of their own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from baton.errors import TransferError
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.events import EventQueue, EventSource
from kv_transfer.transport import MAX_HEADER_BYTES, TransportEvent
from kv_transfer.transports.mailbox import Mailbox

log = logging.getLogger(__name__)

_START_S = 60.0
_CLOSE_S = 10.0


class TransportThread:
    """Runs a transport's commands and operations. `kind` names the transport in logs and errors; `events` receives its
    events.

    The thread runs a subclass's `_open`, then `_turn` until it is stopped, then `_shut`. Only `start`, `call` and
    `stop` are for other threads. Every operation ends with the thread, however that ends.

    Input from a peer is checked where it is read; invalid input ends only that peer's link. So an exception here is a
    bug or a failed library: `poll` raises it, since a node cannot serve without its transport.
    """

    connect: Callable[..., None]
    """Takes the peer, the contents of its address, and a future that is resolved once the peer can be reached."""

    def __init__(self, kind: str, events: EventQueue) -> None:
        self._kind = kind
        self._events = events
        self.is_relaxed = False
        """See `Transport.relax`; for any thread. A thread that sleeps until something happens ignores it."""
        self._emitted = False
        self._stopping = False
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name=f"kv-{kind}", daemon=True)
        self._started: Future[Any] = Future()

    # ---- from any thread ----

    def start(self) -> Any:
        """Start the thread; returns the result of `_open`. Raises TransferError."""
        self._thread.start()
        try:
            return self._started.result(_START_S)
        except TimeoutError:
            raise TransferError(f"{self._kind} did not start within {_START_S:g} s") from None

    def call(self, command: Callable[[], None]) -> None:
        """Have the thread run `command`; once the thread is over, run it on the calling thread."""
        self._mailbox.post(command)

    def batched(self) -> contextlib.AbstractContextManager[None]:
        """Wake the thread for all calls within the context at once."""
        return self._mailbox.held()

    def stop(self, timeout_s: float) -> bool:
        """End all links and the thread. False: it did not end in time."""
        self.call(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- for subclasses ----

    def disconnect(self, peer: str) -> None:
        raise NotImplementedError

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes) -> None:
        raise NotImplementedError

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        raise NotImplementedError

    def _open(self) -> Any:
        """Acquire the thread's resources; `start` returns the result. May raise TransferError or anything else."""
        raise NotImplementedError

    def _turn(self) -> None:
        """Handle what has happened, then wait for more."""
        raise NotImplementedError

    def _shut(self, reason: str, requested: bool) -> None:
        """End all links. `requested`: by this end, so no PeerDisconnected."""
        raise NotImplementedError

    def _over(self) -> None:
        """The thread's last step: from now on `call` runs commands on the calling thread."""

    # ---- the thread ----

    def _run(self) -> None:
        try:
            opened = self._open()
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self._mailbox.close()
            known = isinstance(error, TransferError)
            self._started.set_exception(error if known else TransferError(f"{self._kind} cannot start: {error}"))
            return
        self._started.set_result(opened)
        reason, requested = "closed", True
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # the thread's boundary: every operation ends with it
            log.critical("transport thread failed kind=%s", self._kind, exc_info=error)
            self._events.fail(error)
            self._emitted = True
            reason, requested = f"the {self._kind} thread failed: {error}", False
        try:
            self._shut(reason, requested)
        finally:
            self._mailbox.close()
            self._over()
            self._deliver()

    def _stop(self) -> None:
        self._stopping = True

    def _emit(self, event: TransportEvent) -> None:
        self._events.put(event)
        self._emitted = True
        if self._mailbox.is_closed:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the emitted events."""
        if self._emitted:
            self._emitted = False
            self._events.deliver()


class ThreadedTransport(EventSource):
    """All of a `Transport` except `connect`. A subclass makes its thread, which emits into `_events`, and calls
    `_begin`."""

    _thread: TransportThread
    _info: bytes

    def info(self) -> bytes:
        return self._info

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        return None

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        assert len(header) <= MAX_HEADER_BYTES
        assert storing is DONE, "nothing was placed"
        self._thread.call(partial(self._thread.push, peer, tag, slot, num_bytes, header))

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._thread.call(partial(self._thread.expect, peer, tag, slot, num_bytes))

    def batched(self) -> contextlib.AbstractContextManager[None]:
        return self._thread.batched()

    def relax(self, relaxed: bool) -> None:
        self._thread.is_relaxed = relaxed

    def disconnect(self, peer: str) -> None:
        self._thread.call(partial(self._thread.disconnect, peer))

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._thread.stop(_CLOSE_S):
            log.error("transport thread did not end timeout_s=%g", _CLOSE_S)

    def _begin(self, thread: TransportThread, info: bytes) -> None:
        """The thread is running, and `info` is the address that peers need to reach it."""
        self._thread, self._info = thread, info
        atexit.register(self.close)  # native libraries must not be torn down under a running thread

    def _connect(self, peer: str, timeout_s: float, *where: Any) -> None:
        """`where`: arguments of the thread's `connect` between the peer and the future. Raises TransferError."""
        up: Future[None] = Future()
        self._thread.call(partial(self._open, peer, *where, up))
        try:
            up.result(max(0.0, timeout_s))
        except TimeoutError:
            self._thread.call(partial(self._give_up, peer, up))
            raise TransferError(f"{peer} cannot be reached within {timeout_s:.3g} s") from None

    def _open(self, peer: str, *where: Any) -> None:
        self._events.forget(peer)
        self._thread.connect(peer, *where)

    def _give_up(self, peer: str, up: Future[None]) -> None:
        if not up.done():
            self._thread.disconnect(peer)


def resolve(up: Future[None], error: TransferError | None) -> None:
    """Complete a pending `connect`; None: the peer can be reached."""
    with contextlib.suppress(InvalidStateError):  # it was resolved already
        if error is None:
            up.set_result(None)
        else:
            up.set_exception(error)
