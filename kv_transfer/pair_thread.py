"""The thread of a `PairTransport`: its commands and its loop. Links (`pair_links.py`), their messages
(`pair_messages.py`) and the carrier are touched by nobody else.

It sleeps in epoll while nothing is under way. While something is, it looks again and again, since the carriers have no
descriptor that could wake it, and less often the longer nothing comes of it (`pause_s`).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.carrier import DONE, Carrier, Native
from kv_transfer.mailbox import Mailbox
from kv_transfer.pair_address import PairAddress
from kv_transfer.pair_doors import End
from kv_transfer.pair_ends import DEATH_S, Expect, Push
from kv_transfer.pair_links import Links
from kv_transfer.pair_messages import Messages
from kv_transfer.pair_poll import Ends, pause_s
from kv_transfer.staging import Staging
from kv_transfer.threaded import resolve
from kv_transfer.transport import TransportEvent

log = logging.getLogger(__name__)

_START_S = 60.0
_FINISH_S = 1.0
"""How long the end waits for operations that were cut off."""


class PairThread:
    """`emit` gets the events, on the thread; `wake` is called after some were emitted."""

    def __init__(
        self,
        staging: Staging,
        carrier: Carrier,
        here: PairAddress,
        listener: socket.socket,
        emit: Callable[[TransportEvent], None],
        wake: Callable[[], None],
    ) -> None:
        self._staging = staging
        self._carrier = carrier
        self._here = here
        self._listener = listener
        self._emit_event = emit
        self._wake = wake
        self._emitted = False
        self._stopping = False
        self._mailbox = Mailbox()
        self._ends: Ends[End] = Ends(self._mailbox, listener)
        self._ready: list[tuple[int, int]] = []
        self._messages = Messages(staging, self._mailbox, self._emit)
        self._links = Links(here, listener, self._ends, carrier, self._messages, self._emit)
        self._thread = threading.Thread(target=self._run, name=f"kv-{carrier.kind}", daemon=True)
        self._started: Future[None] = Future()

    # ---- from any thread ----

    def start(self) -> None:
        """Raises TransferError."""
        self._thread.start()
        try:
            self._started.result(_START_S)
        except TimeoutError:
            raise TransferError(f"{self._carrier.kind} did not start within {_START_S:g} s") from None

    def call(self, command: Callable[[], None]) -> None:
        """Have the thread run `command`; once the thread is over, run it here."""
        self._mailbox.post(command)

    def place(self, peer: str, tag: int, num_bytes: int) -> Tensor | None:
        """As for a transport."""
        return self._messages.place(peer, tag, num_bytes) if self._links.is_open(peer) else None

    def stop(self, timeout_s: float) -> bool:
        """End all links and the thread. False: it did not end in time."""
        self.call(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- commands: on the thread ----

    def connect(self, peer: str, address: bytes, theirs: PairAddress, up: Future[None]) -> None:
        """Resolve `up` once the peer can be reached."""
        if self._mailbox.is_closed or self._stopping:
            resolve(up, TransferError("the transport is closed"))
        else:
            self._links.connect(peer, address, theirs, up)

    def disconnect(self, peer: str) -> None:
        self._links.disconnect(peer)

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: Native = DONE) -> None:
        push = Push(tag, slot, num_bytes, header, storing)
        if not self._messages.push_cut(peer, push):
            self._links.submit(peer, push)

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._links.submit(peer, Expect(tag, slot, num_bytes))

    def _stop(self) -> None:
        self._stopping = True

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._carrier.start(self._here.id)
        except Exception as error:  # noqa: BLE001 - told to whoever starts the thread
            self._mailbox.close()
            self._ends.close_all()
            self._listener.close()
            kind = self._carrier.kind
            failure = error if isinstance(error, TransferError) else TransferError(f"{kind} cannot start: {error}")
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        reason = "closed"
        try:
            while not self._stopping:
                self._turn(None)
        except Exception as error:  # the thread's boundary: every operation ends with it
            log.exception("transport thread failed kind=%s", self._carrier.kind)
            reason = f"the {self._carrier.kind} thread failed: {error}"
        try:
            self._shut(reason)
        finally:
            self._mailbox.close()
            self._messages.report_all_failed()
            self._ring()

    def _turn(self, deadline: float | None) -> None:
        """What happened, then a wait for more, until `deadline` at most."""
        self._mailbox.run()
        for descriptor, _ in self._ready:
            self._links.attend(descriptor)
        is_busy = self._links.is_busy
        if is_busy:
            self._carrier.progress()
            self._links.collect()
        self._ring()
        self._ready = self._wait(is_busy, deadline)

    def _wait(self, is_busy: bool, deadline: float | None) -> list[tuple[int, int]]:
        if self._mailbox or self._stopping != (deadline is not None):
            return self._ends.wait(0)
        now = time.monotonic()
        if not is_busy:
            return self._ends.wait(None if deadline is None else max(0.0, deadline - now))
        pause = pause_s(now - self._links.moved_at, self._links.is_urgent)
        if pause >= 1e-3:
            return self._ends.wait(pause)
        ready = self._ends.wait(0)
        if pause and not ready:
            time.sleep(pause)  # epoll counts in milliseconds
        return ready

    def _shut(self, reason: str) -> None:
        self._stopping = True
        self._links.leave(reason, told=reason == "closed")
        deadline = time.monotonic() + max(_FINISH_S, DEATH_S)
        while self._links.is_leaving and time.monotonic() < deadline:
            self._turn(deadline)
        self._carrier.close()
        if not self._links.is_leaving:
            self._staging.forget_retired()
        self._ends.close_all()
        self._listener.close()

    def _emit(self, event: TransportEvent) -> None:
        self._emit_event(event)
        self._emitted = True
        if self._mailbox.is_closed:
            self._ring()

    def _ring(self) -> None:
        if self._emitted:
            self._emitted = False
            self._wake()
