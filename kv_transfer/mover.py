"""The common base of a rank's sender and receiver. Each has its own transport and slots, and both see the pool as
slices."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.audit import KvSlot
from baton.layout import KvLayout, KvSlice, LayerKv, as_quantized
from kv_transfer.copies import Copies, NoCopies
from kv_transfer.parts import part_blocks_for
from kv_transfer.remote import RemotePool, RemoteSlots
from kv_transfer.slices import Rows, rows_of
from kv_transfer.slots import Slots, SlotState
from kv_transfer.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The part was not sent, or not received; `reason` is for people."""

    peer: str
    lease: int
    part: int
    reason: str


class SentLayout:
    """A node's layout, with its layers in the form in which they are sent to a peer. `rows`: the rows of its slices,
    each computed once."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.digest = layout.digest()
        self.rows: dict[KvSlice, Rows] = {}


class KvMover:
    """The mover of one rank, over a transport that no other mover uses.

    pool_bytes: [num_blocks, bytes of a block on that rank], uint8, on the staging's device. `verify`: the node requires
    checksums on all of its parts. spin_wait: see SlotCopies. A simulated node has no pool, and no byte is copied. For
    the pool of another rank's process (a RemotePool), staging and transport are those of a link to it.
    """

    def __init__(
        self,
        transport: Transport,
        staging: Slots,
        pool_bytes: Tensor | RemotePool | None,
        layout: KvLayout,
        rank: int,
        verify: bool,
        spin_wait: bool,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.held = layout.ranks[rank]
        self.block_bytes = layout.num_bytes(self.held)
        assert pool_bytes is None or isinstance(pool_bytes, RemotePool) or pool_bytes.shape[1] == self.block_bytes
        self.verify = verify
        self.transport = transport
        self.num_slots = staging.num_slots
        self.part_blocks = part_blocks_for(staging.slot_bytes, self.block_bytes)
        """The most whole blocks in a part. A part with only some layers or heads may have more blocks, within as many
        bytes."""
        assert self.part_blocks > 0, "a slot is too small for a block"
        self._staging = staging
        self._copies = _copies(staging, pool_bytes, layout, self.part_blocks, spin_wait)
        self._own = SentLayout(layout)
        self._converted: dict[tuple[LayerKv, ...], SentLayout] = {}
        self._lock = threading.RLock()  # guards the slots' states and owners

    def batched(self) -> AbstractContextManager[None]:
        """A context for parts that are sent, or expected, one right after the other, which then cost the caller
        less."""
        return self.transport.batched()

    @property
    def num_free_slots(self) -> int:
        """On any thread."""
        return self._staging.num_free

    def slots(self) -> list[KvSlot]:
        """For the audit."""
        with self._lock:
            self._free_slots()
            return self._staging.audit()

    def warm_up(self) -> None:
        """Compile the GPU kernels that parts need. Call once, before the first part."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert that each slot is free or owned by one part, and in flight exactly while the transport has it."""
        raise NotImplementedError

    def _free_slots(self) -> None:
        """Free the slots that are no longer used."""

    def _sent_layout(self, layers: tuple[LayerKv, ...] | None) -> SentLayout:
        """The layout with these layers; None: with those of the pool."""
        if layers is None or layers is self.layout.layers:
            return self._own
        if (sent := self._converted.get(layers)) is None:
            sent = self._converted[layers] = SentLayout(dataclasses.replace(self.layout, layers=layers))
        return sent

    def _rows_of(self, kv_slice: KvSlice, sent: SentLayout) -> Rows:
        if (rows := sent.rows.get(kv_slice)) is None:
            rows = sent.rows[kv_slice] = rows_of(self.layout, self.rank, kv_slice, sent.layout)
        return rows

    def _usual_rows(self) -> set[Rows]:
        """The rows of whole blocks and of one layer, both as they are and converted. The GPU kernels for parts depend
        on these forms, but not on the size of rows."""
        one_layer = self.held._replace(layer_end=self.held.layer_start + 1)
        quantized = self._sent_layout(tuple(as_quantized(layer) for layer in self.layout.layers))
        can_convert = self.layout.converts(quantized.layout)
        kinds = (self._own, quantized) if can_convert else (self._own,)
        return {self._rows_of(kv_slice, sent) for kv_slice in (self.held, one_layer) for sent in kinds}

    def _check_slots(self, held: Collection[int], in_flight: Collection[int]) -> None:
        """Assert that each slot is free or owned by one part. The caller holds the lock."""
        staging = self._staging
        staging.check_integrity()
        assert all(staging.state(slot) is SlotState.HELD for slot in held)
        assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in in_flight)
        assert staging.num_free + len(held) + len(in_flight) == staging.num_slots, "a slot has no owner"


def _copies(
    staging: Slots, pool_bytes: Tensor | RemotePool | None, layout: KvLayout, part_blocks: int, spin_wait: bool
) -> Copies:
    if isinstance(pool_bytes, RemotePool):
        assert isinstance(staging, RemoteSlots), "the slots of a pool on another host are there"
        return staging.copies
    if pool_bytes is None:
        return NoCopies(part_blocks)
    from kv_transfer.slot_copies import SlotCopies  # imports torch
    from kv_transfer.staging import Staging

    assert isinstance(staging, Staging), "a pool needs slots with memory"
    return SlotCopies(staging, pool_bytes, layout, part_blocks, spin_wait)
