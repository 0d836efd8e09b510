"""What becomes of a transport's operations and peers, on its way from the thread that sees it to whoever is to know."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_transfer.transport import Listener, OperationEvent, PeerDisconnected, TransportEvent


class EventQueue:
    """One per transport, whose threads `put` events and then `deliver` them; any thread polls. `wake` is called, with
    no lock held, when `poll` has something.

    The ends of operations go to whoever has subscribed, in their order, on the thread that delivers or polls; the rest,
    and without a subscriber all, waits for `poll`, which tells the subscriber first of what happened before.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # over what follows
        self._ended: list[OperationEvent] = []  # for the subscriber
        self._events: list[TransportEvent] = []  # for `poll`
        self._is_new = False  # there are such since `wake` was called
        self._failure: Exception | None = None
        self._telling = threading.RLock()  # who tells the subscriber, one at a time, and who is told afterwards

    def subscribe(self, listener: Listener) -> None:
        """Before the first event."""
        assert self._listener is None
        self._listener = listener

    def put(self, event: TransportEvent) -> None:
        with self._lock:
            if self._listener is None or isinstance(event, PeerDisconnected):
                self._events.append(event)
                self._is_new = True
            else:
                self._ended.append(event)

    def fail(self, error: Exception) -> None:
        """The transport has failed: from now on `poll` raises."""
        with self._lock:
            self._failure = error
            self._is_new = True

    def forget(self, peer: str) -> None:
        """Drop its PeerDisconnected: it is connected anew, and nobody has heard of the end of the earlier
        connection."""
        with self._lock:
            self._events = [e for e in self._events if not (isinstance(e, PeerDisconnected) and e.peer == peer)]

    def deliver(self) -> None:
        """Tell of what was put."""
        with self._telling:
            self._tell()
        with self._lock:
            is_new, self._is_new = self._is_new, False
        if is_new:
            self.wake()

    def poll(self) -> list[TransportEvent]:
        """See Transport. Called in each turn of an engine, which mostly finds nothing."""
        if not (self._events or self._ended or self._failure):
            return []
        with self._telling:
            with self._lock:
                events, self._events = self._events, []
            self._tell()
        if self._failure is not None:
            raise RuntimeError(f"the transport failed: {self._failure!r}") from self._failure
        return events

    def _tell(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        if ended:
            assert self._listener is not None
            self._listener(ended)
