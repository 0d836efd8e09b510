"""What a rank's sender and receiver have in common: a transport and slots of their own, and a pool seen as slices."""

from __future__ import annotations

import threading
from collections.abc import Collection

from torch import Tensor

from baton.audit import KvSlot
from baton.layout import KvLayout, KvSlice
from kv_transfer.parts import part_blocks_for
from kv_transfer.slices import Rows, rows_of
from kv_transfer.slot_copies import SlotCopies
from kv_transfer.staging import SlotState, Staging
from kv_transfer.transport import Transport


class KvMover:
    """One rank's, over a transport that serves nobody else.

    pool_bytes: [num_blocks, bytes of a block on that rank], uint8, on the staging's device. `verify`: the node wants
    all its parts checked. spin_wait: see SlotCopies.
    """

    def __init__(
        self,
        transport: Transport,
        staging: Staging,
        pool_bytes: Tensor,
        layout: KvLayout,
        rank: int,
        verify: bool,
        spin_wait: bool,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.held = layout.ranks[rank]
        self.block_bytes = layout.num_bytes(self.held)
        assert pool_bytes.shape[1] == self.block_bytes
        self.verify = verify
        self.transport = transport
        self.num_slots = staging.num_slots
        self.part_blocks = part_blocks_for(staging.slot_bytes, self.block_bytes)
        """The most blocks that a part may have, or as many bytes of more."""
        assert self.part_blocks > 0, "a slot is too small for a block"
        self._staging = staging
        self._copies = SlotCopies(staging, pool_bytes, self.part_blocks, spin_wait)
        self._digest = layout.digest()
        self._rows: dict[KvSlice, Rows] = {}
        self._lock = threading.RLock()  # over the slots' states, and whose they are

    def slots(self) -> list[KvSlot]:
        """For the audit."""
        with self._lock:
            self._free_slots()
            return self._staging.audit()

    def warm_up(self) -> None:
        """Do once what parts need compiled on a GPU. Before the first part."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert that each slot is free or one part's, and in flight exactly when the transport has it."""
        raise NotImplementedError

    def _free_slots(self) -> None:
        """Give back slots that nothing uses any more."""

    def _rows_of(self, what: KvSlice) -> Rows:
        if (rows := self._rows.get(what)) is None:
            rows = self._rows[what] = rows_of(self.layout, self.rank, what)
        return rows

    def _usual_rows(self) -> set[Rows]:
        """Of whole blocks, and of a layer of them: what parts need compiled on a GPU is the same for all sizes."""
        one_layer = self.held._replace(layer_end=self.held.layer_start + 1)
        return {self._rows_of(self.held), self._rows_of(one_layer)}

    def _check_slots(self, held: Collection[int], in_flight: Collection[int]) -> None:
        """Assert that each slot is free or one part's. Under the lock."""
        staging = self._staging
        staging.check_integrity()
        assert all(staging.state(slot) is SlotState.HELD for slot in held)
        assert all(staging.state(slot) is SlotState.IN_FLIGHT for slot in in_flight)
        assert staging.num_free + len(held) + len(in_flight) == staging.num_slots, "a slot has no owner"
