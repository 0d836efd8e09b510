"""The decode side of the mover: parts from prefill nodes, through slots, into the pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.audit import KvSlot
from baton.errors import TransferError
from baton.layout import KvLayout
from baton_kernels.block_checksum import block_checksums
from kv_transfer.parts import PartHeader, part_blocks_for, tag_of
from kv_transfer.sender import PartFailed
from kv_transfer.slot_copies import Mark, SlotCopies
from kv_transfer.staging import SlotOwner, SlotState, Staging
from kv_transfer.transport import Arrived, Failed, PeerLost, Sent, Transport

log = logging.getLogger(__name__)

__all__ = ["KvReceiver", "PartArrived", "PartFailed", "PeerLost"]


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A part is in its slot. Must be passed to `land` or to `discard`, once."""

    peer: str
    lease: int
    part: int
    slot: int
    header: PartHeader

    @property
    def drained(self) -> bool:
        """The sender had no use for the credit: there is nothing to land."""
        return self.header.drain


class KvReceiver:
    """Receives parts through a transport that serves nobody else. Engine's thread only.

    pool_bytes: [num_blocks, block_bytes], uint8, on the staging's device; written by `land` alone. What the network
    writes, whenever it does, ends in a slot. `verify`: parts must come with checksums. Checksums that come, asked for
    or not, are compared before a block is touched; `num_damaged_pieces` counts those that differed.
    """

    def __init__(
        self, transport: Transport, staging: Staging, pool_bytes: Tensor, layout: KvLayout, *, verify: bool = False
    ) -> None:
        assert pool_bytes.shape[1] == layout.block_bytes
        self.layout = layout
        self.verify = verify
        self.num_damaged_pieces = 0
        self.part_blocks = part_blocks_for(staging.slot_bytes, layout.block_bytes)
        """The most blocks that a part may have, or as many bytes of more."""
        assert self.part_blocks > 0, "a slot is too small for a block"
        self._transport = transport
        self._staging = staging
        self._copies = SlotCopies(staging, pool_bytes, self.part_blocks, in_haste=False)
        self._digest = layout.digest()
        self._expected: dict[int, tuple[str, int, int]] = {}  # slot -> peer, lease, part
        self._arrived: set[int] = set()  # slots
        self._landing: set[int] = set()  # slots that a copy on the device still reads
        self._lock = threading.Lock()  # over those and their states

    @property
    def num_free_slots(self) -> int:
        return self._staging.num_free

    def mark(self) -> Mark:
        """All work queued on the device so far: of blocks that are taken now, what earlier owners queued."""
        return self._copies.mark()

    def expect(self, peer: str, lease: int, part: int) -> bool:
        """Post a receive for a part, before the peer may send it. False: no slot is free.

        Each True is answered by one PartArrived or PartFailed. Raises TransferError for a lease or part that no tag
        can name.
        """
        tag = tag_of(lease, part)
        slot = self._staging.take(SlotOwner(peer, lease, part))
        if slot is None:
            return False
        self._expected[slot] = (peer, lease, part)
        self._staging.lend(slot)
        self._transport.expect(peer, tag, slot, self._staging.slot_bytes)
        return True

    def poll(self) -> list[PartArrived | PartFailed | PeerLost]:
        """What happened since the last call. The slot of a PartFailed is free."""
        events: list[PartArrived | PartFailed | PeerLost] = []
        for event in self._transport.poll():
            match event:
                case Arrived(_, _, slot, header):
                    events.append(self._take_in(slot, header))
                case Failed(_, _, slot, reason):
                    part = self._expected.pop(slot)
                    self._staging.reclaim(slot)
                    self._staging.give_back(slot)
                    events.append(PartFailed(*part, reason))
                case PeerLost():
                    events.append(event)
                case Sent():
                    raise AssertionError("a receiver sends nothing")
        return events

    def land(
        self,
        arrived: PartArrived,
        blocks: Sequence[int],
        offset: int = 0,
        piece_bytes: int | None = None,
        not_before: Mark = None,
    ) -> int:
        """Copy the part over the pool's `blocks`, in order: over the bytes [offset, offset + piece_bytes) of each, or
        all. Returns its payload's bytes. The slot is given back.

        The copy waits for `not_before` and for no other work on the device; what is queued on the current stream after
        it waits for the copy. Raises TransferError, with the pool untouched and the slot given back, when the header
        does not say exactly this lease, part, blocks, bytes and layout, or a checksum is missing or wrong.
        """
        slot, header = arrived.slot, arrived.header
        num_bytes = self.layout.block_bytes if piece_bytes is None else piece_bytes
        self._arrived.remove(slot)
        try:
            header.require(arrived.lease, arrived.part, len(blocks), offset, num_bytes, self._digest)
            self._check(self._staging.memory(slot), header)
        except TransferError:
            self._staging.give_back(slot)
            raise
        self._landing.add(slot)
        self._copies.scatter(slot, blocks, offset, num_bytes, not_before)
        self._copies.when_done(slot, partial(self._landed, slot))
        return header.payload_bytes

    def discard(self, arrived: PartArrived) -> None:
        """Give back the slot of a part that nobody wants. No block is touched."""
        self._arrived.remove(arrived.slot)
        self._staging.give_back(arrived.slot)

    def slots(self) -> list[KvSlot]:
        """For the audit."""
        with self._lock:
            return self._staging.audit()

    def warm_up(self) -> None:
        """Do once what parts need compiled on a GPU, with block 0, which is nobody's. Before the first part."""
        if self._staging.device.type == "cuda":
            for num_bytes in {self.layout.block_bytes, self.layout.block_bytes // self.layout.num_layers}:
                self._copies.scatter(0, [0], 0, num_bytes, None)
                self._copies.synchronize()
                block_checksums(self._staging.memory(0)[:num_bytes].view(1, num_bytes))

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        staging = self._staging
        with self._lock:
            staging.check_integrity()
            assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in self._expected)
            assert all(staging.state(slot) is SlotState.HELD for slot in self._arrived | self._landing)
            owned = len(self._expected) + len(self._arrived) + len(self._landing)
            assert staging.num_free + owned == staging.num_slots, "a slot has no owner"

    def _take_in(self, slot: int, data: bytes) -> PartArrived | PartFailed:
        peer, lease, part = self._expected.pop(slot)
        self._staging.reclaim(slot)
        try:
            header = PartHeader.parse(data)
        except TransferError as error:
            self._staging.give_back(slot)
            return PartFailed(peer, lease, part, error.message)
        self._arrived.add(slot)
        return PartArrived(peer, lease, part, slot, header)

    def _check(self, slot: Tensor, header: PartHeader) -> None:
        """Compare checksums. Waits for a GPU, some tens of microseconds: who asks for them pays for them."""
        if not header.checked:
            if self.verify:
                raise TransferError(f"part {header.part} of lease {header.lease} has no checksums")
            return
        with self._staging.reading():
            rows = slot[: header.payload_bytes].view(header.num_blocks, header.piece_bytes)
            sent = slot[header.checksums_at : header.message_bytes].view(torch.int64)
            num_damaged = int((block_checksums(rows) != sent).sum())
        if num_damaged:
            self.num_damaged_pieces += num_damaged
            text = f"{num_damaged} of {header.num_blocks} blocks of part {header.part} are damaged"
            log.error("kv damaged lease=%d part=%d num_damaged=%d", header.lease, header.part, num_damaged)
            raise TransferError(text)

    def _landed(self, slot: int) -> None:
        """Its copy is done. On the engine's thread, or that of the copies."""
        with self._lock:
            self._landing.remove(slot)
            self._staging.give_back(slot)
        self._transport.wake()  # somebody may wait for a slot
