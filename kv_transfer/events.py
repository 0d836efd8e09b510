"""Delivers a transport's events from the threads that detect them to the subscriber and to `poll`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_transfer.transport import Listener, OperationEvent, PeerDisconnected, TransportEvent


class EventQueue:
    """One per transport, whose threads `put` events and then `deliver` them; any thread polls. `wake` is called, with
    no lock held, when `poll` has something.

    Operation events go to the subscriber, in order, on the thread that delivers or polls; other events, or all if there
    is no subscriber, wait for `poll`. `poll` first passes earlier operation events to the subscriber.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # guards the next four attributes
        self._ended: list[OperationEvent] = []  # for the subscriber
        self._events: list[TransportEvent] = []  # for `poll`
        self._is_new = False  # `poll` has something new since `wake` was last called
        self._failure: Exception | None = None
        self._telling = threading.RLock()  # serializes the subscriber's calls, and orders `poll` after them

    def subscribe(self, listener: Listener) -> None:
        """Call before the first event."""
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
        """Drop the peer's PeerDisconnected: it is being reconnected before `poll` reported the earlier loss."""
        with self._lock:
            self._events = [e for e in self._events if not (isinstance(e, PeerDisconnected) and e.peer == peer)]

    def deliver(self) -> None:
        """Pass operation events to the subscriber; call `wake` if `poll` has something new."""
        with self._telling:
            self._tell()
        with self._lock:
            is_new, self._is_new = self._is_new, False
        if is_new:
            self.wake()

    def poll(self) -> list[TransportEvent]:
        """See Transport. The engine calls this in each turn and mostly finds nothing."""
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


class EventSource:
    """The part of a `Transport` that is about its events; a subclass puts them into `_events`, or has its threads do
    so."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events = EventQueue(wake)

    @property
    def wake(self) -> Callable[[], None]:
        return self._events.wake

    def subscribe(self, listener: Listener) -> None:
        self._events.subscribe(listener)

    def poll(self) -> list[TransportEvent]:
        return self._events.poll()
