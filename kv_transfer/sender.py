"""The prefill side of the mover: moves blocks from the pool through slots to decode nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferError
from baton.layout import KvLayout, KvSlice, LayerKv
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.mover import KvMover, PartFailed
from kv_transfer.parts import PartHeader, tag_of
from kv_transfer.remote import RemotePool
from kv_transfer.slots import SlotOwner, Slots
from kv_transfer.transport import Arrived, Failed, PeerDisconnected, Sent, Transport

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KvSender", "PartFailed", "PartSent", "PeerDisconnected", "SenderEvent"]


@dataclass(frozen=True, slots=True)
class PartSent:
    """The part has left its slot, `flight_s` after its push. The push follows the gather into the slot, or the launch
    of the stores into the peer's slot. Only the decode node knows whether the part was delivered."""

    peer: str
    lease: int
    part: int
    flight_s: float = field(default=0.0, compare=False)


SenderEvent = PartSent | PartFailed | PeerDisconnected


class _Outgoing(NamedTuple):
    peer: str
    lease: int
    part: int
    tag: int
    slot: int
    num_bytes: int
    header: PartHeader
    pushed: float = 0.0  # of `time.monotonic`


class _Placed(NamedTuple):
    """A part whose stores into the peer's slot are launched. is_announced: `announce` was called."""

    out: _Outgoing
    target: RemoteSlot
    storing: AsyncOperation
    is_announced: bool


class KvSender(KvMover):
    """Sends one rank's parts. Engine's thread only. A peer is a rank of another node, under the name by which the
    transport has it connected.

    The pool is only read. `send` itself starts the copy out of it, so work queued on the current stream afterwards may
    reuse the blocks. The blocks' KV must be complete before: on a GPU the copy does not wait for queued work. The part
    is handed to the transport when the copy is done, or at once if it is stored into a slot from
    `Transport.acquire_remote_slot`.
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
        super().__init__(transport, staging, pool_bytes, layout, rank, verify, spin_wait=True)
        self.num_placed_parts = 0
        """Parts gathered directly into the peer's slots."""
        self._gathering: dict[int, _Outgoing] = {}  # by slot
        self._placed: list[_Placed] = []  # not pushed yet
        self._is_batched = False
        self._flying: dict[int, _Outgoing] = {}  # by slot

    def send(
        self,
        peer: str,
        lease: int,
        part: int,
        blocks: Sequence[int],
        kv_slice: KvSlice | None = None,
        checked: bool = False,
        layers: tuple[LayerKv, ...] | None = None,
        groups: Sequence[int] = (),
    ) -> bool:
        """Copy `kv_slice` of the blocks, or all that this rank holds, into a slot and send it. checked: with checksums.
        layers: the model's as they are sent; None: as they are in the pool. groups: the blocks' KV groups, if there are
        several. False: no slot is free, and nothing was done.

        Each True leads to exactly one PartSent or PartFailed. Raises TransferError for more blocks or bytes than a slot
        holds, or a lease or part that does not fit in a tag.
        """
        kv_slice = kv_slice or self.held
        sent = self._sent_layout(layers)
        rows = self._rows_of(kv_slice, sent)
        num_rows = len(ids := rows.of(blocks, groups))
        if num_rows * rows.sent_bytes > self.part_blocks * self.block_bytes or num_rows > self._copies.most_pieces:
            size = f"{num_rows} x {rows.sent_bytes} bytes"
            raise TransferError(f"a part of {size}, where {self.part_blocks} blocks at most fit")
        header = PartHeader(lease, part, len(blocks), kv_slice, num_rows, rows.sent_bytes, sent.digest, checked)
        if (out := self._take(peer, header)) is None:
            return False
        placed = self.transport.acquire_remote_slot(peer, out.tag, out.num_bytes)
        storing = self._copies.gather(out.slot, ids, rows, header.checksums, placed)
        if placed is None:
            self._copies.when_done(out.slot, partial(self._push, out))
        else:
            self.num_placed_parts += 1
            is_first = all(other.out.peer != peer for other in self._placed)
            if is_first:
                placed.announce(header.pack())
            self._placed.append(_Placed(out, placed, storing, is_first))
            if storing is DONE or not self._is_batched:
                self._push_placed()
        return True

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """On a GPU, launch the copies of all parts sent within before announcing any but the first to a peer.
        Announcing takes as long as a launch, and the woken transport thread would compete for the interpreter, so the
        link would idle between parts. The first one is announced early: the peer takes 0.2 ms to start looking for it,
        as long as the part takes to arrive."""
        self._is_batched = True
        try:
            yield
        finally:
            self._is_batched = False
            self._push_placed()

    def drain(self, peer: str, lease: int, part: int) -> bool:
        """Use up the credit of a part that is not needed, with an empty part. False: no slot is free."""
        out = self._take(peer, PartHeader(lease, part, 0, self.held, 0, 0, self._own.digest, drain=True))
        if out is not None:
            self._push(out)
        return out is not None

    def poll(self) -> list[SenderEvent]:
        """Events since the last call; the slots of their parts are free."""
        events: list[SenderEvent] = []
        for event in self.transport.poll():
            match event:
                case Sent(_, _, slot):
                    gone = self._land(slot)
                    events.append(PartSent(gone.peer, gone.lease, gone.part, time.monotonic() - gone.pushed))
                case Failed(_, _, slot, reason):
                    gone = self._land(slot)
                    events.append(PartFailed(gone.peer, gone.lease, gone.part, reason))
                case PeerDisconnected():
                    events.append(event)
                case Arrived():
                    raise AssertionError("a sender expects nothing")
        return events

    def warm_up(self) -> None:
        self._copies.warm_up(self._usual_rows(), gathers=True)

    def check_integrity(self) -> None:
        with self._lock:
            self._check_slots(self._gathering, self._flying)

    def _take(self, peer: str, header: PartHeader) -> _Outgoing | None:
        """Take a slot to be filled with the part. None: no slot is free."""
        tag = tag_of(header.lease, header.part)  # raises before a slot is taken
        slot = self._staging.take(SlotOwner(peer, header.lease, header.part))
        if slot is None:
            return None
        out = _Outgoing(peer, header.lease, header.part, tag, slot, header.message_bytes, header)
        self._gathering[slot] = out
        return out

    def _push_placed(self) -> None:
        placed, self._placed = self._placed, []
        for part in placed:
            if not part.is_announced:
                part.target.announce(part.out.header.pack())
        for part in placed:
            self._push(part.out, part.storing)

    def _push(self, out: _Outgoing, storing: AsyncOperation = DONE) -> None:
        """Hand the part to the transport: its slot is filled, or the peer's will be when `storing` is over. `storing`
        belongs to the slot, which is not reused before the transport's event. On the engine's or the copies' thread."""
        with self._lock:
            del self._gathering[out.slot]
            self._staging.lend(out.slot)
            self._flying[out.slot] = out._replace(pushed=time.monotonic())
        self.transport.push(out.peer, out.tag, out.slot, out.num_bytes, out.header.pack(), storing)

    def _land(self, slot: int) -> _Outgoing:
        with self._lock:
            self._staging.reclaim(slot)
            self._staging.give_back(slot)
            return self._flying.pop(slot)
