"""The prefill side of the mover: blocks out of the pool, through slots, to decode nodes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.audit import KvSlot
from baton.errors import TransferError
from baton.layout import KvLayout
from baton_kernels.block_copy import gather_blocks
from kv_transfer.fences import Fence, Fences
from kv_transfer.parts import HEADER_BYTES, PAYLOAD_OFFSET, PartHeader, part_blocks_for, slot_bytes_for, tag_of
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
    hold what they should already: on a GPU the copy does not wait for work that is queued, and the part leaves its
    slot in a later `poll`, once the copy is done.
    """

    def __init__(self, transport: Transport, staging: Staging, pool_bytes: Tensor, layout: KvLayout) -> None:
        assert pool_bytes.shape[1] == layout.block_bytes
        self.part_blocks = part_blocks_for(staging.slot_bytes, layout.block_bytes)
        """The most blocks that a part may have."""
        self._transport = transport
        self._staging = staging
        self._fences = Fences(staging.device, transport.wake)
        on_gpu = staging.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(staging.device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]
        self._pool = pool_bytes
        self._block_bytes = layout.block_bytes
        self._digest = layout.digest()
        self._gathering: deque[tuple[Fence, _Outgoing]] = deque()
        self._flying: dict[int, _Outgoing] = {}  # by slot

    @property
    def num_free_slots(self) -> int:
        return self._staging.num_free

    def send(self, peer: str, lease: int, part: int, blocks: Sequence[int]) -> bool:
        """Copy the blocks into a slot and have them sent. False: no slot is free, nothing was done.

        Each True is answered by one PartSent or PartFailed. Raises TransferError for more blocks than a slot holds, or
        a lease or part that no tag can name.
        """
        if len(blocks) > self.part_blocks:
            raise TransferError(f"a part of {len(blocks)} blocks, where a slot holds {self.part_blocks}")
        num_bytes = slot_bytes_for(len(blocks), self._block_bytes)
        header = PartHeader(lease, part, len(blocks), num_bytes - PAYLOAD_OFFSET, self._digest)
        return self._send(peer, header, blocks, num_bytes)

    def drain(self, peer: str, lease: int, part: int) -> bool:
        """Use up a granted part of a lease that is not needed, with a header alone. False: no slot is free."""
        return self._send(peer, PartHeader(lease, part, 0, 0, self._digest, drain=True), (), HEADER_BYTES)

    def poll(self) -> list[PartSent | PartFailed | PeerLost]:
        """What became of parts since the last call; their slots are free."""
        self._launch_gathered()
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
        return self._staging.audit()

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        staging = self._staging
        staging.check_integrity()
        gathering = {out.slot for _, out in self._gathering}
        assert all(staging.state(slot) is SlotState.HELD for slot in gathering)
        assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in self._flying)
        assert staging.num_free + len(gathering) + len(self._flying) == staging.num_slots, "a slot has no owner"

    def _send(self, peer: str, header: PartHeader, blocks: Sequence[int], num_bytes: int) -> bool:
        tag_of(header.lease, header.part)  # refuses before a slot is taken
        slot = self._staging.take(SlotOwner(peer, header.lease, header.part))
        if slot is None:
            return False
        out = self._staging.memory(slot)[PAYLOAD_OFFSET : PAYLOAD_OFFSET + header.payload_bytes]
        with self._beside_steps():
            gather_blocks(self._pool, blocks, out.view(len(blocks), self._block_bytes))
            self._staging.write(slot, header.pack())
            fence = self._fences.record()
        self._gathering.append((fence, _Outgoing(peer, header.lease, header.part, slot, num_bytes)))
        self._launch_gathered()
        return True

    @contextlib.contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """On a GPU, copies from blocks of retired steps need not wait for the step that runs; but steps launched from
        now on, which may be given these blocks, wait for the copies."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _launch_gathered(self) -> None:
        while self._gathering and self._gathering[0][0].query():
            _, out = self._gathering.popleft()
            self._staging.lend(out.slot)
            self._flying[out.slot] = out
            self._transport.push(out.peer, tag_of(out.lease, out.part), out.slot, out.num_bytes)

    def _land(self, slot: int) -> _Outgoing:
        self._staging.reclaim(slot)
        self._staging.give_back(slot)
        return self._flying.pop(slot)
