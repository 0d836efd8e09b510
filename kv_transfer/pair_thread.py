"""The thread of a `PairTransport`: it owns connections, carrier and operations.

It sleeps in epoll while nothing is under way. While something is, it looks again and again, since the carriers have no
descriptor that could wake it, and less often the longer nothing comes of it (`pause_s`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.carrier import DONE, Carrier, Native
from kv_transfer.channel import Channel, Frame, Kind
from kv_transfer.mailbox import Mailbox
from kv_transfer.pair_address import PairAddress
from kv_transfer.pair_doors import Dial, Doors, End, Greeting
from kv_transfer.pair_ends import DEATH_S, Expect, Grant, Inbound, Link, Outbound, Push
from kv_transfer.pair_offers import Offers
from kv_transfer.pair_poll import Ends, pause_s
from kv_transfer.staging import Staging
from kv_transfer.transport import MAX_HEADER_BYTES, Arrived, Failed, PeerLost, Sent, TransportEvent

log = logging.getLogger(__name__)

_START_S = 60.0
_GRANT_S = 1e-3
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
        self._links: dict[str, Link] = {}
        self._unclaimed: dict[str, Inbound] = {}  # who called before `connect` named it
        self._leaving: list[Outbound | Inbound] = []
        self._failing: list[tuple[Native, Failed]] = []  # to be told when that is over
        self._offers = Offers()
        self._ready: list[tuple[int, int]] = []
        self._moved_at = 0.0
        self._emitted = False
        self._stopping = False
        self._mailbox = Mailbox()
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
        """As for a transport. The credit may have been faster than the grant, which is waited for, briefly."""
        link = self._links.get(peer)
        if link is None or link.out is None:
            return None
        return self._offers.place(peer, tag, num_bytes, _GRANT_S)

    def stop(self, timeout_s: float) -> bool:
        """End all links and the thread. False: it did not end in time."""
        self.call(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- commands: on the thread ----

    def connect(self, peer: str, address: bytes, theirs: PairAddress, up: Future[None]) -> None:
        """Resolve `up` once the peer can be reached."""
        link = self._links.get(peer)
        if self._mailbox.is_closed or self._stopping:
            _resolve(up, TransferError("the transport is closed"))
        elif link is None:
            self._open_link(Link(peer, address, theirs, [up]))
        elif link.address != address:
            _resolve(up, TransferError(f"{peer} is connected at another address"))
        elif link.out is not None:
            _resolve(up, None)
        else:
            link.waiting.append(up)

    def disconnect(self, peer: str) -> None:
        if link := self._links.get(peer):
            self._drop(link, "disconnected", told=True)

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: Native = DONE) -> None:
        if self._offers.push_cut(peer, tag, storing):
            self._fail_after(storing, Failed(peer, tag, slot, "the connection was lost before all was stored"))
            return
        link = self._links.get(peer)
        if link is None or tag in link.pushes:
            self._emit(Failed(peer, tag, slot, "not connected" if link is None else "the tag is in use"))
            return
        link.pushes[tag] = Push(tag, slot, num_bytes, header, storing)
        self._launch(link, tag)

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        link = self._links.get(peer)
        if link is None or tag in link.expects:
            self._emit(Failed(peer, tag, slot, "not connected" if link is None else "the tag is in use"))
            return
        link.expects[tag] = expect = Expect(tag, slot, num_bytes)
        if link.inward is not None:
            self._grant(link, link.inward, expect)

    def _stop(self) -> None:
        self._stopping = True

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._carrier.start(self._here.id)
        except Exception as error:  # noqa: BLE001 - told to whoever starts the thread
            self._mailbox.close()
            self._listener.close()
            kind = self._carrier.kind
            failure = error if isinstance(error, TransferError) else TransferError(f"{kind} cannot start: {error}")
            self._started.set_exception(failure)
            return
        self._ends: Ends[End] = Ends(self._mailbox, self._listener)
        self._doors = Doors(self._here, self._listener, self._ends, self._open, self._give_up, self._take_in)
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
            for _, failed in self._failing:
                self._emit(failed)
            self._ring()

    def _turn(self, deadline: float | None) -> None:
        """What happened, then a wait for more, until `deadline` at most."""
        self._mailbox.run()
        for descriptor, _ in self._ready:
            if descriptor == self._listener.fileno():
                self._doors.accept()
            elif end := self._ends.at(descriptor):
                self._attend(end)
        busy = bool(self._leaving) or any(link.is_busy for link in self._links.values())
        if busy:
            self._carrier.progress()
            for link in list(self._links.values()):
                self._collect(link)
            self._close_over()
        self._ring()
        self._ready = self._wait(busy, deadline)

    def _wait(self, busy: bool, deadline: float | None) -> list[tuple[int, int]]:
        if self._mailbox or self._stopping != (deadline is not None):
            return self._ends.wait(0)
        now = time.monotonic()
        if not busy:
            return self._ends.wait(None if deadline is None else max(0.0, deadline - now))
        is_urgent = any(link.is_urgent for link in self._links.values())
        pause = pause_s(now - self._moved_at, is_urgent)
        if pause >= 1e-3:
            return self._ends.wait(pause)
        ready = self._ends.wait(0)
        if pause and not ready:
            time.sleep(pause)  # epoll counts in milliseconds
        return ready

    def _emit(self, event: TransportEvent) -> None:
        self._emit_event(event)
        self._emitted = True
        if self._mailbox.is_closed:
            self._ring()

    def _ring(self) -> None:
        if self._emitted:
            self._emitted = False
            self._wake()

    # ---- connections ----

    def _open_link(self, link: Link) -> None:
        self._links[link.peer] = link
        self._doors.dial(link)
        if inward := self._unclaimed.pop(link.remote, None):
            self._attach(link, inward)

    def _give_up(self, link: Link, reason: str) -> None:
        self._drop(link, reason, told=True)

    def _open(self, link: Link, channel: Channel) -> None:
        """The peer was reached: what is pushed goes this way."""
        memory = bytes.fromhex(link.theirs.memory)
        try:
            sending = self._carrier.sending(link.remote, memory, lambda note: channel.send(Kind.NOTE, payload=note))
        except TransferError as error:
            channel.send(Kind.BYE)
            self._drop(link, error.message, told=True)
            return
        link.out = Outbound(channel, sending)
        self._ends.put(link.out)
        for up in link.waiting:
            _resolve(up, None)
        link.waiting = []

    def _take_in(self, remote: str, channel: Channel, host: str) -> None:
        """The peer calls. If it did before, it has begun anew, and that way is over."""
        inward = Inbound(channel, self._carrier.receiving(remote, host), remote)
        self._ends.put(inward)
        if (link := self._link_to(remote)) is not None and link.inward is not None:
            self._attend(link.inward)  # its end may be here already
        if (link := self._link_to(remote)) is not None and link.inward is not None:
            if any(expect.granted for expect in link.expects.values()):
                self._drop(link, "the peer connected anew", told=False)
            else:
                self._leave(link.inward)
        link = self._link_to(remote)
        if link is not None:
            self._attach(link, inward)
            return
        if before := self._unclaimed.pop(remote, None):
            self._leave(before)
        self._unclaimed[remote] = inward

    def _link_to(self, remote: str) -> Link | None:
        return next((link for link in self._links.values() if link.remote == remote), None)

    def _attach(self, link: Link, inward: Inbound) -> None:
        link.inward = inward
        for expect in list(link.expects.values()):
            self._grant(link, inward, expect)

    def _link_of(self, end: Outbound | Inbound) -> Link | None:
        return next((link for link in self._links.values() if end in (link.out, link.inward)), None)

    def _attend(self, end: End) -> None:
        """Read and write what its connection is ready for."""
        channel, descriptor = end.channel, end.channel.fileno()
        if isinstance(end, Dial) and channel.dialling:
            self._doors.answered(end)
            return
        channel.flush()
        for frame in channel.receive():
            now = self._ends.at(descriptor)  # by the frame before, it may have become another, or none
            if now is not None and now.channel is channel:
                self._hear(now, frame)
        now = self._ends.at(descriptor)
        if channel.lost and now is not None and now.channel is channel:
            self._lose(now)

    def _lose(self, end: End) -> None:
        if isinstance(end, Dial | Greeting):
            self._doors.lose(end)
            return
        if isinstance(end, Inbound):
            if not end.broke_at:
                end.end()
            self._part_with(end)
        elif link := self._link_of(end):
            self._drop(link, "the peer is gone", told=False)

    def _hear(self, end: End, frame: Frame) -> None:
        match end, frame.kind:
            case ((Dial() | Greeting()), _):
                self._doors.hear(end, frame)
            case Outbound(), Kind.GRANT:
                if link := self._link_of(end):
                    self._take_grant(link, end, frame)
            case Inbound(), Kind.BYE:
                end.said_bye = True
                self._part_with(end)
            case Inbound(), Kind.NOTE:
                end.receiving.hear(frame.payload)
            case Inbound(), Kind.BEGIN | Kind.END | Kind.LONG:
                if link := self._link_of(end):
                    self._hear_of_message(link, end, frame)
            case _:
                end.channel.lost = True  # nobody who speaks this protocol

    # ---- messages ----

    def _grant(self, link: Link, inward: Inbound, expect: Expect) -> None:
        try:
            place = inward.receiving.place(self._staging.memory(expect.slot))
        except TransferError as error:
            self._drop(link, error.message, told=False)
            return
        expect.granted = True
        inward.channel.send(Kind.GRANT, expect.tag, expect.num_bytes, place)

    def _take_grant(self, link: Link, out: Outbound, frame: Frame) -> None:
        try:
            memory = out.sending.reach(frame.payload, frame.num_bytes)
        except TransferError as error:
            self._drop(link, error.message, told=False)
            return
        grant = out.grants[frame.tag] = Grant(frame.num_bytes, frame.payload, memory)
        if frame.tag in link.pushes:
            self._launch(link, frame.tag)
        elif memory is not None:
            self._offers.put(link.peer, frame.tag, grant)

    def _launch(self, link: Link, tag: int) -> None:
        """Send what is both pushed and granted."""
        push, out = link.pushes.get(tag), link.out
        if push is None or out is None or tag not in out.grants:
            return
        grant = out.grants.pop(tag)
        self._offers.withdraw(link.peer, tag)
        self._moved_at = time.monotonic()
        if grant.placed:
            push.placed, push.native = True, push.storing
            is_over = push.native.query() and not push.native.error
            out.channel.send(Kind.BEGIN, tag, push.num_bytes, push.header, more_follows=is_over)
            if is_over:
                self._end(link, push)
            return
        if push.num_bytes > grant.num_bytes:
            out.channel.send(Kind.LONG, tag, push.num_bytes)
            del link.pushes[tag]
            self._emit(Sent(link.peer, tag, push.slot))
            return
        out.channel.send(Kind.BEGIN, tag, push.num_bytes, push.header)
        try:
            push.native = out.sending.send(self._staging.memory(push.slot), push.num_bytes, grant.place)
        except TransferError as error:
            self._drop(link, error.message, told=False)

    def _hear_of_message(self, link: Link, inward: Inbound, frame: Frame) -> None:
        expect = link.expects.get(frame.tag)
        if expect is None and frame.kind is Kind.END:
            return  # the bytes were faster than the word
        is_long = expect is not None and frame.num_bytes > expect.num_bytes
        if expect is None or is_long != (frame.kind is Kind.LONG) or len(frame.payload) > MAX_HEADER_BYTES:
            inward.channel.lost = True
        elif frame.kind is Kind.LONG:
            del link.expects[frame.tag]
            reason = f"message of {frame.num_bytes} bytes, where {expect.num_bytes} were expected"
            self._emit(Failed(link.peer, expect.tag, expect.slot, reason))
        elif frame.kind is Kind.BEGIN:
            expect.begun, expect.header = True, frame.payload
            self._moved_at = time.monotonic()
            try:
                expect.native = inward.receiving.begin(self._staging.memory(expect.slot), frame.num_bytes)
            except TransferError as error:
                self._drop(link, error.message, told=False)
        elif frame.kind is Kind.END and expect.native is None:
            self._end(link, expect)

    def _collect(self, link: Link) -> None:
        """Report what is complete. What fails takes the connection with it: neither carrier can go on after that."""
        for operation, native in link.under_way:
            if native.query():
                if native.error:
                    self._drop(link, native.error, told=False)
                    return
                self._end(link, operation)

    def _end(self, link: Link, operation: Push | Expect) -> None:
        self._moved_at = time.monotonic()
        if isinstance(operation, Push):
            assert link.out is not None
            del link.pushes[operation.tag]
            link.out.channel.send(Kind.END, operation.tag, operation.num_bytes)
            self._emit(Sent(link.peer, operation.tag, operation.slot))
        else:
            del link.expects[operation.tag]
            self._emit(Arrived(link.peer, operation.tag, operation.slot, operation.header))

    # ---- ends ----

    def _part_with(self, inward: Inbound) -> None:
        """The peer sends nothing more this way. That ends the link if it may have begun to; else this was the way of an
        earlier link that it gave up, and it calls again, or the other way ends too."""
        link = self._link_of(inward)
        if link is None:
            if self._unclaimed.get(inward.remote) is inward:
                del self._unclaimed[inward.remote]
                self._leave(inward)
            return
        if any(e.begun or (e.granted and not inward.said_bye) for e in link.expects.values()):
            self._drop(link, "the peer is gone", told=False)
            return
        link.inward = None
        for expect in link.expects.values():
            expect.granted = False
        self._leave(inward)

    def _drop(self, link: Link, reason: str, told: bool) -> None:
        """End all that is under way with the peer. `told`: somebody asked for it."""
        if self._links.get(link.peer) is not link:
            return
        for operation, native in link.under_way:
            if native.query() and not native.error:
                self._end(link, operation)  # what is complete counts
        del self._links[link.peer]
        self._doors.give_up(link)
        out, inward = link.out, link.inward
        if out is not None:
            out.leaving = [push.native for push in link.pushes.values() if push.native is not None]
            for tag, grant in self._offers.cut(link.peer, out.grants).items():
                out.channel.send(Kind.BEGIN, tag, grant.num_bytes)  # or the peer takes its slot for untouched
                out.leaving.append(grant)
            self._leave(out)
        if inward is not None:
            inward.leaving = [expect.native for expect in link.expects.values() if expect.native is not None]
            self._leave(inward)
        for push in link.pushes.values():
            if push.native is not None and not push.placed:
                self._staging.renew(push.slot, push.native.query)
            self._fail_after(push.storing, Failed(link.peer, push.tag, push.slot, reason))
        for expect in link.expects.values():
            if expect.granted and inward is not None:
                self._staging.renew(expect.slot, lambda: inward.is_over)
            self._emit(Failed(link.peer, expect.tag, expect.slot, reason))
        connecting = bool(link.waiting)
        for up in link.waiting:
            _resolve(up, TransferError(f"{link.peer} cannot be reached: {reason}"))
        if not told and not connecting:
            self._emit(PeerLost(link.peer, reason))

    def _leave(self, end: Outbound | Inbound) -> None:
        """Its connection stays until what is under way is over, which the other end must be told, or tell."""
        self._moved_at = time.monotonic()
        if isinstance(end, Outbound):
            end.channel.send(Kind.BYE)
            end.sending.abort()
        else:
            end.channel.hang_up()
            end.receiving.abort()
            if end.channel.lost and not end.broke_at:
                end.end()
        self._leaving.append(end)

    def _close_over(self) -> None:
        for end in [end for end in self._leaving if end.is_over]:
            self._leaving.remove(end)
            (end.sending if isinstance(end, Outbound) else end.receiving).close()
            self._ends.close(end)
        for item in [item for item in self._failing if item[0].query()]:
            self._failing.remove(item)
            self._emit(item[1])

    def _fail_after(self, storing: Native, failed: Failed) -> None:
        """The slot is the mover's again once nothing is stored on its behalf, which the connection that is leaving
        waits for too; or when this thread is over."""
        if storing.query() or self._mailbox.is_closed:
            self._emit(failed)
        else:
            self._failing.append((storing, failed))

    def _shut(self, reason: str) -> None:
        self._stopping = True
        for link in list(self._links.values()):
            self._drop(link, reason, told=reason == "closed")
        while self._unclaimed:
            self._leave(self._unclaimed.popitem()[1])
        deadline = time.monotonic() + max(_FINISH_S, DEATH_S)
        while self._leaving and time.monotonic() < deadline:
            self._turn(deadline)
        self._carrier.close()
        if not self._leaving:
            self._staging.forget_retired()
        self._ends.close_all()
        self._listener.close()


def _resolve(up: Future[None], error: TransferError | None) -> None:
    with contextlib.suppress(InvalidStateError):  # whoever waited has given up
        if error is None:
            up.set_result(None)
        else:
            up.set_exception(error)
