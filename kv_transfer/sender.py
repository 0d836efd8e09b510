"""The prefill side of the mover: blocks out of the pool, through slots, to decode nodes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from baton.audit import KvSlot
from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.carrier import DONE, Native, Target
from kv_transfer.parts import PartHeader, part_blocks_for, tag_of
from kv_transfer.slot_copies import SlotCopies
from kv_transfer.staging import SlotOwner, SlotState, Staging
from kv_transfer.transport import Arrived, Failed, PeerLost, Sent, Transport

__all__ = ["KvSender", "PartFailed", "PartSent", "PeerLost"]


@dataclass(frozen=True, slots=True)
class PartSent:
    """The part left its slot, `flight_s` after it was in it, or began to be stored at the peer; whether it was
    delivered only the decode node knows."""

    peer: str
    lease: int
    part: int
    flight_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class PartFailed:
    peer: str
    lease: int
    part: int
    reason: str


class _Outgoing(NamedTuple):
    peer: str
    lease: int
    part: int
    tag: int
    slot: int
    num_bytes: int
    header: PartHeader
    pushed: float = 0.0  # of `time.monotonic`


class KvSender:
    """Sends parts through a transport that serves nobody else. Engine's thread only.

    pool_bytes: [num_blocks, block_bytes], uint8, on the staging's device; only read. A part is copied out of the pool
    by `send` itself, so its blocks are free afterwards for whatever is queued on the current stream next. They must
    hold what they should already: on a GPU the copy does not wait for work that is queued. The part goes to the
    transport by itself once the copy is done; at once if it goes where `Transport.place` says. `verify`: the node wants
    all its parts checked.
    """

    def __init__(
        self, transport: Transport, staging: Staging, pool_bytes: Tensor, layout: KvLayout, *, verify: bool = False
    ) -> None:
        assert pool_bytes.shape[1] == layout.block_bytes
        self.layout = layout
        self.verify = verify
        self.part_blocks = part_blocks_for(staging.slot_bytes, layout.block_bytes)
        """The most blocks that a part may have, or as many bytes of more."""
        self.num_placed_parts = 0
        """Gathered straight into the peer's slots."""
        self._transport = transport
        self._staging = staging
        self._copies = SlotCopies(staging, pool_bytes, self.part_blocks, in_haste=True)
        self._digest = layout.digest()
        self._lock = threading.Lock()  # over `_gathering`, `_flying` and the states of their slots
        self._gathering: dict[int, _Outgoing] = {}  # by slot
        self._placed: list[tuple[_Outgoing, Target, Native]] = []  # gathered into the peer's slots, and not pushed yet
        self._is_together = False
        self._flying: dict[int, _Outgoing] = {}  # by slot

    @property
    def num_free_slots(self) -> int:
        return self._staging.num_free

    def send(
        self,
        peer: str,
        lease: int,
        part: int,
        blocks: Sequence[int],
        offset: int = 0,
        piece_bytes: int | None = None,
        checked: bool = False,
    ) -> bool:
        """Copy the blocks into a slot and have them sent: of each the bytes [offset, offset + piece_bytes), or all.
        checked: with checksums. False: no slot is free, nothing was done.

        Each True is answered by one PartSent or PartFailed. Raises TransferError for more blocks or bytes than a slot
        holds, or a lease or part that no tag can name.
        """
        num_bytes = self.layout.block_bytes if piece_bytes is None else piece_bytes
        whole = self.part_blocks * self.layout.block_bytes
        if len(blocks) * num_bytes > whole or len(blocks) > self._copies.most_pieces:
            raise TransferError(f"a part of {len(blocks)} x {num_bytes} bytes, of {self.part_blocks} blocks at most")
        header = PartHeader(lease, part, len(blocks), offset, num_bytes, self._digest, checked)
        if (out := self._take(peer, header)) is None:
            return False
        sums_at = header.checksums_at if checked else None
        placed = self._transport.place(peer, out.tag, out.num_bytes)
        storing = self._copies.gather(out.slot, blocks, offset, num_bytes, sums_at, placed)
        if placed is None:
            self._copies.when_done(out.slot, partial(self._push, out))
        else:
            self.num_placed_parts += 1
            self._placed.append((out, placed, storing))
            if storing is DONE or not self._is_together:
                self._push_placed()
        return True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Where a device copies, have it begin with all that is sent within before anybody hears of any: to say so
        takes as long as a launch, and the transport's thread, once woken, would want the interpreter too, and the link
        be idle between the parts."""
        self._is_together = True
        try:
            yield
        finally:
            self._is_together = False
            self._push_placed()

    def drain(self, peer: str, lease: int, part: int) -> bool:
        """Use up a granted part of a lease that is not needed, with a header alone. False: no slot is free."""
        out = self._take(peer, PartHeader(lease, part, 0, 0, 0, self._digest, drain=True))
        if out is not None:
            self._push(out)
        return out is not None

    def poll(self) -> list[PartSent | PartFailed | PeerLost]:
        """What became of parts since the last call; their slots are free."""
        events: list[PartSent | PartFailed | PeerLost] = []
        for event in self._transport.poll():
            match event:
                case Sent(_, _, slot):
                    gone = self._land(slot)
                    events.append(PartSent(gone.peer, gone.lease, gone.part, time.monotonic() - gone.pushed))
                case Failed(_, _, slot, reason):
                    gone = self._land(slot)
                    events.append(PartFailed(gone.peer, gone.lease, gone.part, reason))
                case PeerLost():
                    events.append(event)
                case Arrived():
                    raise AssertionError("a sender expects nothing")
        return events

    def slots(self) -> list[KvSlot]:
        """For the audit."""
        with self._lock:
            return self._staging.audit()

    def warm_up(self) -> None:
        """Do once what parts need compiled on a GPU. Before the first part."""
        if self._staging.device.type == "cuda":
            for num_bytes in {self.layout.block_bytes, self.layout.block_bytes // self.layout.num_layers}:
                header = PartHeader(0, 0, 1, 0, num_bytes, self._digest, checked=True)
                self._copies.gather(0, [0], 0, num_bytes, header.checksums_at)
                self._copies.synchronize()

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        staging = self._staging
        with self._lock:
            staging.check_integrity()
            assert all(staging.state(slot) is SlotState.HELD for slot in self._gathering)
            assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in self._flying)
            owned = len(self._gathering) + len(self._flying)
            assert staging.num_free + owned == staging.num_slots, "a slot has no owner"

    def _take(self, peer: str, header: PartHeader) -> _Outgoing | None:
        """A slot for the part, to be filled. None: no slot is free."""
        tag = tag_of(header.lease, header.part)  # refuses before a slot is taken
        slot = self._staging.take(SlotOwner(peer, header.lease, header.part))
        if slot is None:
            return None
        out = _Outgoing(peer, header.lease, header.part, tag, slot, header.message_bytes, header)
        self._gathering[slot] = out
        return out

    def _push_placed(self) -> None:
        placed, self._placed = self._placed, []
        for out, target, _ in placed:
            target.announce(out.header.pack())
        for out, _, storing in placed:
            self._push(out, storing)

    def _push(self, out: _Outgoing, storing: Native = DONE) -> None:
        """Its slot is filled, or the peer's will be when `storing` is over: that is the slot's, which is nobody else's
        until the transport has said what became of it. On the engine's thread, or that of the copies."""
        with self._lock:
            del self._gathering[out.slot]
            self._staging.lend(out.slot)
            self._flying[out.slot] = out._replace(pushed=time.monotonic())
        self._transport.push(out.peer, out.tag, out.slot, out.num_bytes, out.header.pack(), storing)

    def _land(self, slot: int) -> _Outgoing:
        with self._lock:
            self._staging.reclaim(slot)
            self._staging.give_back(slot)
            return self._flying.pop(slot)
