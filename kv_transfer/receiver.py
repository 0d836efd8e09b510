"""The decode side of the mover: moves parts from prefill nodes through slots into the pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferError
from baton.layout import KvLayout, KvSlice, LayerKv
from kv_transfer.copies import Mark, Move
from kv_transfer.mover import KvMover, PartFailed
from kv_transfer.parts import PartHeader, tag_of
from kv_transfer.remote import RemotePool
from kv_transfer.slots import SlotOwner, Slots
from kv_transfer.transport import Arrived, Failed, OperationEvent, PeerDisconnected, Sent, Transport, TransportEvent

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

__all__ = ["KvReceiver", "PartFailed", "PartLanded", "PartRefused", "PartUnused", "PeerDisconnected", "ReceiverEvent"]


@dataclass(frozen=True, slots=True)
class PartLanded:
    """The part is in its blocks, or its scatter is launched and work queued on the engine's stream from now on waits
    for it. `landing_s`: the host time this took."""

    peer: str
    lease: int
    part: int
    num_bytes: int
    landing_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class PartUnused:
    """The sender did not need the credit, or the part came after its lease was withdrawn. No block was touched."""

    peer: str
    lease: int
    part: int


@dataclass(frozen=True, slots=True)
class PartRefused:
    """The message does not match the plan, or is damaged. No block was touched."""

    peer: str
    lease: int
    part: int
    error: TransferError


ReceiverEvent = PartLanded | PartUnused | PartRefused | PartFailed | PeerDisconnected


class _Plan(NamedTuple):
    """An expected part: it goes to `kv_slice` of its blocks, `num_bytes` in all. land: launches the scatter. header:
    the header that the part has without checksums if the sender's pool holds the slice in one piece per block (or per
    layer, if blocks of KV groups differ). digest: of the layout as it is sent."""

    peer: str
    lease: int
    part: int
    num_blocks: int
    kv_slice: KvSlice
    num_bytes: int
    land: Move
    header: bytes
    digest: bytes
    withdrawn: bool = False

    @property
    def name(self) -> tuple[str, int, int]:
        return self.peer, self.lease, self.part


class KvReceiver(KvMover):
    """Receives one rank's parts. Engine's thread only. A peer is a rank of another node, under the name by which the
    transport has it connected.

    A part lands as soon as it arrives, on the transport's thread, to which this subscribes. The engine gets the event
    afterwards, and is woken only if it can make progress and does not poll soon anyway: waking another thread of the
    same interpreter takes some 0.1 ms, as long as a part. One lock guards what both threads use: a part has either
    landed before its lease is withdrawn, or never lands.

    The network writes only into slots. `verify`: parts must have checksums. Checksums are compared before a block is
    touched, whether required or not; `num_damaged_pieces` counts the pieces whose checksum differed.
    """

    def __init__(
        self,
        transport: Transport,
        staging: Slots,
        pool_bytes: Tensor | RemotePool | None,
        layout: KvLayout,
        rank: int = 0,
        *,
        verify: bool = False,
    ) -> None:
        super().__init__(transport, staging, pool_bytes, layout, rank, verify, spin_wait=False)
        self.num_damaged_pieces = 0
        # The lock also guards everything below, and the copies.
        self._plans: dict[int, _Plan] = {}  # by slot: parts that have not arrived
        self._landing: list[int] = []  # slots that a copy reads, or did at the last check; in the order of the copies
        self._unawaited: int | None = None  # the slot of the last copy, if the engine's stream does not wait for it yet
        # By lease, for leases with parts that are not expected yet, for lack of a slot or of a turn: whether parts have
        # arrived.
        self._partial: dict[int, bool] = {}
        self._is_called = False  # the engine was woken and has not polled since
        self._polls_soon = False  # see `polls_soon`
        self._events: list[ReceiverEvent] = []
        self._failure: Exception | None = None
        self._wake_engine = transport.wake
        transport.subscribe(self._operations_ended)

    @property
    def num_free_slots(self) -> int:
        """On any thread."""
        with self._lock:
            self._free_slots()
            return self._staging.num_free

    @property
    def num_freed_slots(self) -> int:
        """How many times slots have become free so far. On any thread."""
        with self._lock:
            self._free_slots()
            return self._staging.num_freed

    def mark(self) -> Mark:
        """A mark after all work queued on the device so far, including that of earlier owners of newly allocated
        blocks."""
        return self._copies.mark()

    def expect(
        self,
        peer: str,
        lease: int,
        part: int,
        blocks: Sequence[int],
        kv_slice: KvSlice | None = None,
        not_before: Mark = None,
        is_last: bool = False,
        layers: tuple[LayerKv, ...] | None = None,
        groups: Sequence[int] = (),
        uploads: bool = True,
    ) -> bool:
        """Post a receive for a part, before the peer may send it. layers: the model's as they are sent; None: as they
        are in the pool. groups: the blocks' KV groups, if there are several. uploads: see `SlotCopies.scatter`; not
        done once parts of the lease are on their way. False: no slot is free.

        is_last: now all parts of the lease are expected. From then on the engine is woken only when the last missing
        part lands. Until then, unless it `polls_soon`, it is woken once for each part: when the part lands if a slot is
        free, else when its slot becomes free. Turns compete with the transport's thread for the interpreter.

        The part is copied into the pool's `blocks`, in order: into `kv_slice` of each, or all that this rank holds. The
        copy waits for `not_before` and for no other work on the device. Only the receiver may write the blocks until
        the part's event or `withdraw`.

        Each True leads to exactly one PartLanded, PartUnused, PartRefused or PartFailed. A part is refused if its
        header does not name exactly this lease, part, blocks, slice and layout, or a checksum is missing or wrong.
        Raises TransferError for a lease or part that does not fit in a tag.
        """
        tag, kv_slice, sent = tag_of(lease, part), kv_slice or self.held, self._sent_layout(layers)
        rows = self._rows_of(kv_slice, sent)
        ids = rows.of(blocks, groups)
        with self._lock:
            is_under_way = self._partial.setdefault(lease, False)
            self._free_slots()
            slot = self._staging.take(SlotOwner(peer, lease, part))
            if slot is None:
                for busy in self._landing:
                    self._copies.when_done(busy, self._wake_engine)
                return False
            if is_last:
                del self._partial[lease]
            land = self._copies.scatter(slot, ids, rows, not_before, uploads and not is_under_way)
            num_blocks, num_bytes = len(blocks), len(ids) * rows.sent_bytes
            pieces = (num_blocks, rows.most * rows.sent_bytes) if len(rows.runs) == 1 else (len(ids), rows.sent_bytes)
            header = PartHeader(lease, part, num_blocks, kv_slice, *pieces, sent.digest).pack()
            self._plans[slot] = _Plan(peer, lease, part, num_blocks, kv_slice, num_bytes, land, header, sent.digest)
            self._staging.lend(slot)
        self.transport.expect(peer, tag, slot, self._staging.slot_bytes)
        return True

    def withdraw(self, lease: int) -> None:
        """Stop landing parts of the lease: its blocks belong to the caller again, for work queued on the current stream
        from now on. Parts that arrive later are reported as PartUnused; those that have landed as PartLanded."""
        with self._lock:
            for slot, plan in self._plans.items():
                if plan.lease == lease:
                    self._plans[slot] = plan._replace(withdrawn=True)
            self._partial.pop(lease, None)
            self._await_copies()

    def poll(self) -> list[ReceiverEvent]:
        """Events since the last call. On a GPU the current stream waits for the copies of parts that have landed."""
        self._is_called = True  # the engine is polling already
        transport_events = self.transport.poll()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._take_in(transport_events)
            self._await_copies()
            events, self._events, self._is_called = self._events, [], False
        return events

    def polls_soon(self, soon: bool) -> None:
        """Say whether the engine will poll without being woken, since a step is under way. While it will, it is not
        woken for each part, but only for a lease of which nothing is on its way any more, and the transport may be
        late: turns for single parts, and a thread that spins, would delay the launches of steps. Cheap if nothing
        changes."""
        if soon == self._polls_soon:
            return
        self.transport.relax(soon)
        with self._lock:
            self._polls_soon = soon
            if not soon and self._events:
                self._call_engine()  # it may not have been woken for parts that have landed meanwhile

    def warm_up(self) -> None:
        self._copies.warm_up(self._usual_rows(), gathers=False)

    def check_integrity(self) -> None:
        with self._lock:
            self._free_slots()
            self._check_slots(self._landing, self._plans)

    # ---- any thread ----

    def _operations_ended(self, events: list[OperationEvent]) -> None:
        """The transport's listener, called on a thread of its own or within `poll`."""
        try:
            with self._lock, self._copies.on_device():
                self._take_in(events)
        except Exception as error:  # noqa: BLE001 - `poll` raises it on the engine's thread
            self._failure = error
            self._wake_engine()

    def _take_in(self, events: Sequence[TransportEvent]) -> None:
        for event in events:
            match event:
                case Arrived(_, _, slot, header):
                    self._tell(self._arrived(slot, header))
                case Failed(_, _, slot, reason):
                    plan = self._plans.pop(slot)
                    self._staging.reclaim(slot)
                    self._staging.give_back(slot)
                    self._tell(PartFailed(*plan.name, reason))
                case PeerDisconnected():
                    self._tell(event)
                case Sent():
                    raise AssertionError("a receiver sends nothing")

    def _tell(self, event: ReceiverEvent) -> None:
        self._events.append(event)
        if not isinstance(event, PartLanded):
            self._call_engine()

    def _call_engine(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._wake_engine()

    def _arrived(self, slot: int, data: bytes) -> ReceiverEvent:
        began, plan = time.monotonic(), self._plans.pop(slot)
        self._staging.reclaim(slot)
        try:
            if not self._is_wanted(slot, plan, data):
                self._staging.give_back(slot)
                return PartUnused(*plan.name)
        except TransferError as error:
            self._staging.give_back(slot)
            return PartRefused(*plan.name, error)
        self._land(slot, plan)
        return PartLanded(*plan.name, plan.num_bytes, time.monotonic() - began)

    def _land(self, slot: int, plan: _Plan) -> None:
        """Launch the part's copy, and wake the engine if it can go on: see `expect`. The engine may be woken first,
        since its poll waits until the copy is launched."""
        self._landing.append(slot)
        self._unawaited = slot
        if is_partial := plan.lease in self._partial:
            self._partial[plan.lease] = True
        was_last = all(other.lease != plan.lease for other in self._plans.values())
        has_free, sleeps = self._staging.num_free > 0, not self._polls_soon
        if was_last or (is_partial and has_free and sleeps):
            self._call_engine()
        plan.land()
        if self._partial and not has_free and sleeps:
            self._copies.when_done(slot, self._wake_engine)  # a lease has parts that wait for a slot

    def _await_copies(self) -> None:
        """Engine's thread only. Copies run in order, so waiting for the last one waits for all."""
        if self._unawaited is not None and not self._copies.is_done(self._unawaited):
            self._copies.make_stream_wait(self._unawaited)
        self._unawaited = None

    def _is_wanted(self, slot: int, plan: _Plan, data: bytes) -> bool:
        """Whether the part should land. Raises TransferError if it is not the planned one, or is damaged."""
        if data == plan.header and not plan.withdrawn and not self.verify:
            return True  # as nearly all are, so that nothing need be parsed
        header = PartHeader.parse(data)
        if header.drain or plan.withdrawn:
            return False
        header.require(plan.lease, plan.part, plan.num_blocks, plan.kv_slice, plan.num_bytes, plan.digest)
        self._check(slot, header)
        return True

    def _check(self, slot: int, header: PartHeader) -> None:
        """Compare checksums. Waits some tens of microseconds for a GPU."""
        if not header.checked:
            if self.verify:
                raise TransferError(f"part {header.part} of lease {header.lease} has no checksums")
            return
        num_damaged = self._copies.num_damaged(slot, header) if header.num_pieces else 0
        if num_damaged:
            self.num_damaged_pieces += num_damaged
            text = f"{num_damaged} of {header.num_pieces} pieces of part {header.part} are damaged"
            log.error("kv damaged lease=%d part=%d num_damaged=%d", header.lease, header.part, num_damaged)
            raise TransferError(text)

    def _free_slots(self) -> None:
        """Free the slots that no copy reads any more; copies finish in order. Called when a slot is needed, since the
        end of a copy wakes the engine only while a lease has parts that are not expected yet."""
        num_done = len(self._landing)
        while num_done and not self._copies.is_done(self._landing[num_done - 1]):
            num_done -= 1
        for slot in self._landing[:num_done]:
            self._staging.give_back(slot)
        del self._landing[:num_done]
