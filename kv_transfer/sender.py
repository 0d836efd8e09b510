"""The prefill side of the mover: blocks out of the pool, through slots, to decode nodes."""

from __future__ import annotations

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
from baton_kernels.block_copy import gather_blocks, host_numbers
from kv_transfer.copy_stream import CopyStream
from kv_transfer.parts import HEADER_BYTES, HEADER_WORDS, PAYLOAD_OFFSET, PartHeader, part_blocks_for, tag_of
from kv_transfer.staging import SlotOwner, SlotState, Staging
from kv_transfer.transport import Arrived, Failed, PeerLost, Sent, Transport

__all__ = ["KvSender", "PartFailed", "PartSent", "PeerLost"]


@dataclass(frozen=True, slots=True)
class PartSent:
    """The part left its slot; whether it was delivered only the decode node knows."""

    peer: str
    lease: int
    part: int


@dataclass(frozen=True, slots=True)
class PartFailed:
    peer: str
    lease: int
    part: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Outgoing:
    peer: str
    lease: int
    part: int
    slot: int
    num_bytes: int


class KvSender:
    """Sends parts through a transport that serves nobody else. Engine's thread only.

    pool_bytes: [num_blocks, block_bytes], uint8, on the staging's device; only read. A part is copied out of the pool
    by `send` itself, so its blocks are free afterwards for whatever is queued on the current stream next. They must
    hold what they should already: on a GPU the copy does not wait for work that is queued. The part goes to the
    transport by itself once the copy is done. `verify`: the node wants all its parts checked.
    """

    def __init__(
        self, transport: Transport, staging: Staging, pool_bytes: Tensor, layout: KvLayout, *, verify: bool = False
    ) -> None:
        assert pool_bytes.shape[1] == layout.block_bytes
        self.layout = layout
        self.verify = verify
        self.part_blocks = part_blocks_for(staging.slot_bytes, layout.block_bytes)
        """The most blocks that a part may have, or as many bytes of more."""
        self._transport = transport
        self._staging = staging
        self._copies = CopyStream(staging.device)
        self._pool = pool_bytes
        self._digest = layout.digest()
        self._lock = threading.Lock()  # over the two below and the states of their slots
        self._gathering: dict[int, _Outgoing] = {}  # by slot
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

        Each True is answered by one PartSent or PartFailed. Raises TransferError for more bytes than a slot holds, or a
        lease or part that no tag can name.
        """
        num_bytes = self.layout.block_bytes if piece_bytes is None else piece_bytes
        if len(blocks) * num_bytes > self.part_blocks * self.layout.block_bytes:
            raise TransferError(f"a part of {len(blocks)} x {num_bytes} bytes, of {self.part_blocks} blocks at most")
        header = PartHeader(lease, part, len(blocks), offset, num_bytes, self._digest, checked)
        return self._send(peer, header, blocks)

    def drain(self, peer: str, lease: int, part: int) -> bool:
        """Use up a granted part of a lease that is not needed, with a header alone. False: no slot is free."""
        return self._send(peer, PartHeader(lease, part, 0, 0, 0, self._digest, drain=True), ())

    def poll(self) -> list[PartSent | PartFailed | PeerLost]:
        """What became of parts since the last call; their slots are free."""
        events: list[PartSent | PartFailed | PeerLost] = []
        for event in self._transport.poll():
            match event:
                case Sent(_, _, slot):
                    gone = self._land(slot)
                    events.append(PartSent(gone.peer, gone.lease, gone.part))
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
                numbers = host_numbers([*header.words(), 0], self._staging.device)
                self._fill(self._staging.memory(0), header, numbers)
                torch.cuda.current_stream(self._staging.device).synchronize()  # until then it reads the numbers

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        staging = self._staging
        with self._lock:
            staging.check_integrity()
            assert all(staging.state(slot) is SlotState.HELD for slot in self._gathering)
            assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in self._flying)
            owned = len(self._gathering) + len(self._flying)
            assert staging.num_free + owned == staging.num_slots, "a slot has no owner"

    def _send(self, peer: str, header: PartHeader, blocks: Sequence[int]) -> bool:
        tag_of(header.lease, header.part)  # refuses before a slot is taken
        slot = self._staging.take(SlotOwner(peer, header.lease, header.part))
        if slot is None:
            return False
        out = _Outgoing(peer, header.lease, header.part, slot, header.message_bytes)
        self._gathering[slot] = out
        numbers = host_numbers([*header.words(), *blocks], self._staging.device)
        with self._copies.beside_steps(partial(self._push, out, numbers)):
            self._fill(self._staging.memory(slot), header, numbers)
        return True

    def _fill(self, slot: Tensor, header: PartHeader, numbers: Tensor) -> None:
        """numbers: the header's words, then the blocks; on the host."""
        words, blocks = numbers[:HEADER_WORDS], numbers[HEADER_WORDS:]
        slot[:HEADER_BYTES].view(torch.int64).copy_(words, non_blocking=True)  # cheaper to launch than a kernel
        pieces = self._pool[:, header.offset : header.offset + header.piece_bytes]
        payload = slot[PAYLOAD_OFFSET : header.payload_end].view(len(blocks), header.piece_bytes)
        gather_blocks(pieces, blocks, payload)
        if header.checked:
            sums = slot[header.checksums_at : header.message_bytes].view(torch.int64)
            sums.copy_(block_checksums(pieces, blocks))

    def _push(self, out: _Outgoing, _used: Tensor) -> None:
        """Its copy is done, and has `_used` no longer. On the engine's thread, or that of the copies."""
        with self._lock:
            del self._gathering[out.slot]
            self._staging.lend(out.slot)
            self._flying[out.slot] = out
        self._transport.push(out.peer, tag_of(out.lease, out.part), out.slot, out.num_bytes)

    def _land(self, slot: int) -> _Outgoing:
        with self._lock:
            self._staging.reclaim(slot)
            self._staging.give_back(slot)
            return self._flying.pop(slot)
