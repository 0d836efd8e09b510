"""The decode side of the mover: parts from prefill nodes, through slots, into the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.audit import KvSlot
from baton.errors import TransferError
from baton.layout import KvLayout
from baton_kernels.block_copy import scatter_blocks
from kv_transfer.fences import Fence, Fences
from kv_transfer.parts import HEADER_BYTES, PAYLOAD_OFFSET, PartHeader, part_blocks_for, tag_of
from kv_transfer.sender import PartFailed
from kv_transfer.staging import SlotOwner, SlotState, Staging
from kv_transfer.transport import Arrived, Failed, PeerLost, Sent, Transport

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
    writes, whenever it does, ends in a slot.
    """

    def __init__(self, transport: Transport, staging: Staging, pool_bytes: Tensor, layout: KvLayout) -> None:
        assert pool_bytes.shape[1] == layout.block_bytes
        self.part_blocks = part_blocks_for(staging.slot_bytes, layout.block_bytes)
        """Blocks in a part, but for a lease's last."""
        assert self.part_blocks > 0, "a slot is too small for a block"
        self._transport = transport
        self._staging = staging
        self._fences = Fences(staging.device, transport.wake)
        self._pool = pool_bytes
        self._layout = layout
        self._expected: dict[int, tuple[str, int, int]] = {}  # slot -> peer, lease, part
        self._arrived: set[int] = set()  # slots
        self._landing: deque[tuple[Fence, int]] = deque()  # slots that a copy on the device still reads

    @property
    def num_free_slots(self) -> int:
        self._free_landed()
        return self._staging.num_free

    def expect(self, peer: str, lease: int, part: int) -> bool:
        """Post a receive for a part, before the peer may send it. False: no slot is free.

        Each True is answered by one PartArrived or PartFailed. Raises TransferError for a lease or part that no tag
        can name.
        """
        tag = tag_of(lease, part)
        self._free_landed()
        slot = self._staging.take(SlotOwner(peer, lease, part))
        if slot is None:
            return False
        self._expected[slot] = (peer, lease, part)
        self._staging.lend(slot)
        self._transport.expect(peer, tag, slot, self._staging.slot_bytes)
        return True

    def poll(self) -> list[PartArrived | PartFailed | PeerLost]:
        """What happened since the last call. The slot of a PartFailed is free."""
        self._free_landed()
        events: list[PartArrived | PartFailed | PeerLost] = []
        for event in self._transport.poll():
            match event:
                case Arrived(_, _, slot):
                    events.append(self._take_in(slot))
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

    def land(self, arrived: PartArrived, blocks: Sequence[int]) -> int:
        """Copy the part over the pool's `blocks`, in order; returns its payload's bytes. The slot is given back.

        The copy is in order with the work queued on the current stream. Raises TransferError, with the pool untouched
        and the slot given back, when the header does not say exactly this lease, part, number of blocks and layout.
        """
        self._arrived.remove(arrived.slot)
        try:
            arrived.header.require(arrived.lease, arrived.part, len(blocks), self._layout)
        except TransferError:
            self._staging.give_back(arrived.slot)
            raise
        num_bytes = arrived.header.payload_bytes
        payload = self._staging.memory(arrived.slot)[PAYLOAD_OFFSET : PAYLOAD_OFFSET + num_bytes]
        scatter_blocks(payload.view(len(blocks), self._layout.block_bytes), self._pool, blocks)
        self._landing.append((self._fences.record(), arrived.slot))
        self._free_landed()
        return num_bytes

    def discard(self, arrived: PartArrived) -> None:
        """Give back the slot of a part that nobody wants. No block is touched."""
        self._arrived.remove(arrived.slot)
        self._staging.give_back(arrived.slot)

    def slots(self) -> list[KvSlot]:
        """For the audit."""
        self._free_landed()
        return self._staging.audit()

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        staging, landing = self._staging, {slot for _, slot in self._landing}
        staging.check_integrity()
        assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in self._expected)
        assert all(staging.state(slot) is SlotState.HELD for slot in self._arrived | landing)
        owned = len(self._expected) + len(self._arrived) + len(landing)
        assert staging.num_free + owned == staging.num_slots, "a slot has no owner"

    def _take_in(self, slot: int) -> PartArrived | PartFailed:
        peer, lease, part = self._expected.pop(slot)
        self._staging.reclaim(slot)
        try:
            header = PartHeader.parse(self._staging.read(slot, HEADER_BYTES))
        except TransferError as error:
            self._staging.give_back(slot)
            return PartFailed(peer, lease, part, error.message)
        self._arrived.add(slot)
        return PartArrived(peer, lease, part, slot, header)

    def _free_landed(self) -> None:
        while self._landing and self._landing[0][0].query():
            self._staging.give_back(self._landing.popleft()[1])
