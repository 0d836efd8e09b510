"""The thread of a `PairTransport`: its commands and its loop. Only this thread uses the links (`links.py`), their
messages (`messages.py`) and the carrier, except where they say otherwise.

It sleeps in epoll while no operation is under way. Otherwise it polls, since the carriers have no descriptor that could
wake it, and less often the longer there is no progress (`pause_s`).
"""

from __future__ import annotations

import time
from concurrent.futures import Future

from baton.errors import TransferError
from baton.rpc.cluster_secret import ClusterSecret
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.events import EventQueue
from kv_transfer.slots import Slots
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import Carrier
from kv_transfer.transports.pair.dialling import End
from kv_transfer.transports.pair.ends import DEATH_S, Expect, Push
from kv_transfer.transports.pair.links import Links
from kv_transfer.transports.pair.listener import Listener
from kv_transfer.transports.pair.messages import Messages
from kv_transfer.transports.pair.poller import ChannelPoller, pause_s
from kv_transfer.transports.threaded import TransportThread, resolve

_FINISH_S = 1.0
"""How long shutdown waits for operations that were cut off, unless DEATH_S is longer."""


class PairThread(TransportThread):
    def __init__(
        self,
        staging: Slots,
        carrier: Carrier,
        here: PairAddress,
        listener: Listener,
        events: EventQueue,
        secret: ClusterSecret | None,
    ) -> None:
        super().__init__(carrier.kind, events)
        self._staging = staging
        self._carrier = carrier
        self._here = here
        self._listener = listener
        self._ends: ChannelPoller[End] = ChannelPoller(self._mailbox, listener)
        self._ready: list[tuple[int, int]] = []
        self._messages = Messages(staging, self._mailbox, self._emit)
        self._links = Links(here, listener, self._ends, carrier, self._messages, self._emit, secret)

    # ---- from any thread ----

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        """As for a transport."""
        return self._messages.acquire_remote_slot(peer, tag, num_bytes) if self._links.is_open(peer) else None

    # ---- commands: on the thread ----

    def connect(self, peer: str, address: bytes, theirs: PairAddress, up: Future[None]) -> None:
        """Resolve `up` once the peer can be reached."""
        if self._mailbox.is_closed or self._stopping:
            resolve(up, TransferError("the transport is closed"))
        else:
            self._links.connect(peer, address, theirs, up)

    def disconnect(self, peer: str) -> None:
        self._links.disconnect(peer)

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        push = Push(tag, slot, num_bytes, header, storing)
        if not self._messages.push_cut(peer, push):
            self._links.submit(peer, push)

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._links.submit(peer, Expect(tag, slot, num_bytes))

    # ---- the thread ----

    def _open(self) -> None:
        try:
            self._carrier.start(self._here.id)
        except BaseException:
            self._ends.close_all()
            self._listener.close()
            raise

    def _turn(self, deadline: float | None = None) -> None:
        """Handle what has happened, then wait for more, until `deadline` at most."""
        self._mailbox.run()
        for descriptor, _ in self._ready:
            self._links.attend(descriptor)
        is_busy = self._links.is_busy
        if is_busy:
            self._carrier.progress()
            self._links.collect()
        self._deliver()
        self._ready = self._wait(is_busy, deadline)

    def _wait(self, is_busy: bool, deadline: float | None) -> list[tuple[int, int]]:
        if self._mailbox or self._stopping != (deadline is not None):
            return self._ends.wait(0)
        now = time.monotonic()
        if not is_busy:
            return self._ends.wait(None if deadline is None else max(0.0, deadline - now))
        pause = pause_s(now - self._links.moved_at, self._links.is_urgent, self.is_relaxed)
        if pause >= 1e-3:
            return self._ends.wait(pause)
        ready = self._ends.wait(0)
        if pause and not ready:
            time.sleep(pause)  # epoll counts in milliseconds
        return ready

    def _shut(self, reason: str, requested: bool) -> None:
        self._stopping = True
        self._links.leave(reason, requested)
        deadline = time.monotonic() + max(_FINISH_S, DEATH_S)
        while self._links.is_leaving and time.monotonic() < deadline:
            self._turn(deadline)
        self._carrier.close()
        if not self._links.is_leaving:
            self._staging.forget_retired()
        self._ends.close_all()
        self._listener.close()

    def _over(self) -> None:
        self._messages.report_all_failed()
