"""The messages of a `PairTransport`'s links, from push and expect to the one event that ends each.

`Messages` owns the operations of links (`Link.pushes`, `Link.expects`, `Outbound.grants`) and the grant table, and
emits all Sent, Arrived and Failed. When a carrier fails, it raises TransferError, and the owner of the link
(`links.py`) ends the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.errors import TransferError
from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.slots import Slots
from kv_transfer.transport import MAX_HEADER_BYTES, Arrived, Failed, Sent, TransportEvent
from kv_transfer.transports.mailbox import Mailbox
from kv_transfer.transports.pair.channel import Frame, Kind
from kv_transfer.transports.pair.ends import Expect, Grant, Inbound, Link, Outbound, Push
from kv_transfer.transports.pair.grants import GrantTable

_GRANT_S = 1e-3
_MOST_GRANTS = 1 << 16
"""The most open grants of one peer, far more than it has slots."""


class Messages:
    """Transport's thread only, except `acquire_remote_slot`. mailbox: the thread's, closed when the thread is over."""

    def __init__(self, staging: Slots, mailbox: Mailbox, emit: Callable[[TransportEvent], None]) -> None:
        self._staging = staging
        self._mailbox = mailbox
        self._emit = emit
        self._grant_table = GrantTable()
        self._failing: list[tuple[AsyncOperation, Failed]] = []  # to emit when the stores are over
        self.moved_at = 0.0
        """When a message last made progress."""

    # ---- any thread ----

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        """As for a transport. Waits briefly for the grant, since the credit may arrive before it."""
        return self._grant_table.acquire_remote_slot(peer, tag, num_bytes, _GRANT_S)

    # ---- pushed and expected ----

    def submit(self, link: Link, operation: Push | Expect) -> None:
        if operation.tag in (link.pushes if isinstance(operation, Push) else link.expects):
            self.refuse(link.peer, operation, "the tag is in use")
        elif isinstance(operation, Push):
            link.pushes[operation.tag] = operation
            self._launch(link, operation.tag)
        else:
            link.expects[operation.tag] = operation
            if link.inward is not None:
                self._grant(link.inward, operation)

    def refuse(self, peer: str, operation: Push | Expect, reason: str) -> None:
        self._emit(Failed(peer, operation.tag, operation.slot, reason))

    def push_cut(self, peer: str, push: Push) -> bool:
        """Whether the link was lost after the push was placed: it then fails once its stores are over."""
        is_cut = self._grant_table.push_cut(peer, push.tag, push.storing)
        if is_cut:
            reason = "the connection was lost before all was stored"
            self._fail_after(push.storing, Failed(peer, push.tag, push.slot, reason))
        return is_cut

    # ---- agreed with the peer ----

    def grant(self, link: Link, inward: Inbound) -> None:
        """The peer's connection is open: grant everything that is expected on it."""
        for expect in link.expects.values():
            self._grant(inward, expect)

    def take_grant(self, link: Link, out: Outbound, frame: Frame) -> None:
        if frame.tag in out.grants or len(out.grants) >= _MOST_GRANTS:
            raise TransferError("the peer grants more than there can be")
        target = out.sending.reach(frame.payload, frame.num_bytes, frame.tag)
        grant = out.grants[frame.tag] = Grant(frame.num_bytes, frame.payload, target, out.channel)
        if frame.tag in link.pushes:
            self._launch(link, frame.tag)
        elif target is not None:
            self._grant_table.put(link.peer, frame.tag, grant)

    def handle(self, link: Link, inward: Inbound, frame: Frame) -> None:
        """BEGIN, END or LONG."""
        expect = link.expects.get(frame.tag)
        if expect is None and frame.kind is Kind.END:
            return  # the native operation, or the completion flag, was faster
        is_long = expect is not None and frame.num_bytes > expect.num_bytes
        in_turn = expect is not None and expect.granted and expect.begun == (frame.kind is Kind.END)
        if (
            expect is None
            or not in_turn
            or is_long != (frame.kind is Kind.LONG)
            or len(frame.payload) > MAX_HEADER_BYTES
        ):
            inward.channel.lost = True
        elif frame.kind is Kind.LONG:
            del link.expects[frame.tag]
            reason = f"message of {frame.num_bytes} bytes, where {expect.num_bytes} were expected"
            self._emit(Failed(link.peer, expect.tag, expect.slot, reason))
        elif frame.kind is Kind.BEGIN:
            expect.begun, expect.header = True, frame.payload
            self.moved_at = time.monotonic()
            expect.native = inward.receiving.begin(self._staging.memory(expect.slot), frame.num_bytes)
        elif frame.kind is Kind.END and expect.native is None:
            self._end(link, expect)

    def _grant(self, inward: Inbound, expect: Expect) -> None:
        place = inward.receiving.export_slot(self._staging.memory(expect.slot))
        expect.granted = inward.has_granted = True
        inward.channel.send(Kind.GRANT, expect.tag, expect.num_bytes, place)

    def _launch(self, link: Link, tag: int) -> None:
        """Send the message if it is both pushed and granted."""
        push, out = link.pushes.get(tag), link.out
        if push is None or out is None or tag not in out.grants:
            return
        grant = out.grants.pop(tag)
        self._grant_table.withdraw(link.peer, tag)
        self.moved_at = time.monotonic()
        if grant.placed:
            assert grant.target is not None
            push.placed, push.signals, push.native = True, grant.target.signals, push.storing
            is_over = push.native.query() and not push.native.error
            if not grant.announced:
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
        push.native = out.sending.send(self._staging.memory(push.slot), push.num_bytes, grant.place)

    # ---- over ----

    def collect(self, link: Link) -> None:
        """Report completed operations."""
        for operation, native in link.under_way:
            if native.query():
                if native.error:
                    raise TransferError(native.error)
                self._end(link, operation)
        self._end_arrived(link)

    def cut(self, link: Link) -> None:
        """The link ends: report completed operations; the rest leave with its connections, and `fail` reports them."""
        for operation, native in link.under_way:
            if native.query() and not native.error:
                self._end(link, operation)
        self._end_arrived(link)
        out, inward = link.out, link.inward
        if out is not None:
            out.leaving = [push.native for push in link.pushes.values() if push.native is not None]
            for tag, grant in self._grant_table.cut(link.peer, out.grants).items():
                out.channel.send(Kind.STRAY, tag)  # or the peer would reuse a slot that is still written to
                out.leaving.append(grant)
        if inward is not None:
            inward.leaving = [expect.native for expect in link.expects.values() if expect.native is not None]

    def fail(self, link: Link, reason: str) -> None:
        """Fail the link's operations; its connections are leaving, and slots that they still access get other
        memory."""
        inward = link.inward
        for push in link.pushes.values():
            if push.native is not None and not push.placed:
                self._staging.renew(push.slot, push.native.query)
            self._fail_after(push.storing, Failed(link.peer, push.tag, push.slot, reason))
        for expect in link.expects.values():
            if expect.granted and inward is not None:
                self._staging.renew(expect.slot, lambda: inward.is_over)
            self._emit(Failed(link.peer, expect.tag, expect.slot, reason))

    def report_failed(self) -> None:
        """Emit the Failed of pushes whose stores are over."""
        for item in [item for item in self._failing if item[0].query()]:
            self._failing.remove(item)
            self._emit(item[1])

    def report_all_failed(self) -> None:
        """Emit all pending Failed events, since the thread is over."""
        for _, failed in self._failing:
            self._emit(failed)

    def _end_arrived(self, link: Link) -> None:
        """End receives whose completion flag is set. Their END may be late, or never come: a peer that died after its
        last store has sent everything."""
        for expect in link.coming:
            assert link.inward is not None
            if link.inward.receiving.has_arrived(self._staging.memory(expect.slot), expect.tag):
                self._end(link, expect)

    def _end(self, link: Link, operation: Push | Expect) -> None:
        self.moved_at = time.monotonic()
        if isinstance(operation, Push):
            assert link.out is not None
            del link.pushes[operation.tag]
            link.out.channel.send(Kind.END, operation.tag, operation.num_bytes)
            self._emit(Sent(link.peer, operation.tag, operation.slot))
        else:
            del link.expects[operation.tag]
            self._emit(Arrived(link.peer, operation.tag, operation.slot, operation.header))

    def _fail_after(self, storing: AsyncOperation, failed: Failed) -> None:
        """Return the slot to the mover once the stores for it are over, for which the leaving connection waits too, or
        when this thread is over."""
        if storing.query() or self._mailbox.is_closed:
            self._emit(failed)
        else:
            self._failing.append((storing, failed))
