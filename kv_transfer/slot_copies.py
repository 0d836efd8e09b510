"""Copies between the pool and the slots, concurrent with the steps that a GPU computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.layout import KvLayout
from baton_kernels.block_checksum import block_checksums
from baton_kernels.block_copy import Move, PoolMoves
from baton_kernels.event_thread import EventThread
from baton_kernels.fp8_kv.moves import QuantizingMoves
from baton_kernels.streams import copy_stream, side_stream
from kv_transfer.async_operation import DONE, AsyncOperation, CudaEventOperation, RemoteSlot
from kv_transfer.copies import Mark
from kv_transfer.parts import CHECKSUM_BYTES, MAX_PIECES, Checksums, PartHeader
from kv_transfer.slices import Rows
from kv_transfer.staging import Staging

__all__ = ["Mark", "SlotCopies"]


class SlotCopies:
    """Gathers blocks into slots, or scatters slots into blocks, on the copy stream of its GPU; on a CPU at once. Use it
    from one thread at a time, with one copy at a time per slot, since each slot has one event and one set of ids on
    host and device.

    pool_bytes: [num_blocks, block_bytes], uint8, on the staging's device, of that layout. If rows are sent in another
    form than the pool's, a gather quantizes them, and a scatter dequantizes them.

    A copy does not wait for steps under way; steps launched after a gather wait for it, those launched after
    `make_stream_wait` wait for a scatter. Steps are launched on the thread that calls `mark`, `gather` and
    `make_stream_wait`, on its current device. The AsyncOperation that a copy returns is over when the copy is; it
    belongs to the slot, and is invalid once the slot has another copy. spin_wait: the thread of `when_done` spins until
    a copy is done, some 0.1 ms, instead of sleeping, since a wake-up would take as long again and delay the part.
    """

    def __init__(
        self, staging: Staging, pool_bytes: Tensor, layout: KvLayout, part_blocks: int, spin_wait: bool
    ) -> None:
        self.most_pieces = max(part_blocks, MAX_PIECES)
        self._staging = staging
        self._pool = pool_bytes
        self._layout = layout
        self._views: dict[tuple[int, bool], tuple[Tensor, PoolMoves | QuantizingMoves]] = {}  # by rows of a block
        device = self._device = staging.device
        on_gpu = device.type == "cuda"
        ids = torch.empty((staging.num_slots, self.most_pieces), dtype=torch.int64, pin_memory=on_gpu)
        self._ids, self._numbers = list(ids), list(ids.numpy())  # the same memory
        self._device_ids: list[Tensor] = list(torch.empty_like(ids, device=device)) if on_gpu else self._ids
        self._stream: Any = copy_stream(device) if on_gpu else None
        events: Any = torch.cuda.Event
        self._done = [events(blocking=not spin_wait) for _ in range(staging.num_slots)] if on_gpu else []
        self._watch = EventThread(device, "kv-copies")

    def mark(self) -> Mark:
        """A mark after all work queued so far on the current stream."""
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def gather(
        self,
        slot: int,
        ids: Sequence[int],
        rows: Rows,
        checksums: Checksums | None,
        placed: RemoteSlot | None = None,
    ) -> AsyncOperation:
        """Copy the rows `ids` (of `Rows.of`) to the start of the slot, and their checksums, if wanted, to where
        `checksums` says. placed: the peer's slot to use instead, from `Transport.acquire_remote_slot`."""
        memory = self._staging.memory(slot) if placed is None else placed.memory
        if ids:
            self._gather(slot, ids, rows, checksums, memory)
        if placed is not None:
            placed.signal(self._stream)
        launched = self._launched(slot)
        self.make_stream_wait(slot)
        return launched

    def scatter(self, slot: int, ids: Sequence[int], rows: Rows, not_before: Mark, in_advance: bool = False) -> Move:
        """Prepare a copy of the slot's beginning into the rows `ids`, to run once the work that `not_before`
        marks is done. Calling the result launches the copy, on any thread, even one that launches no steps. The slot's
        previous copy must be done.

        in_advance: nothing waits for this call, so it also uploads the ids. That takes 90 us, in which two threads
        compete for the interpreter. A scatter of 32 or 96 MiB then takes an H200 21 or 57 us, instead of 33 or 68 if it
        reads the ids over the bus.
        """
        memory, move = self._staging.memory(slot), _nothing
        if ids:
            _, moves = self._take_rows(slot, ids, rows)
            where = self._uploaded_ids(slot, len(ids)) if in_advance else self._ids[slot]
            move = moves.scatter(where, len(ids), rows.offset, rows.row_bytes, memory, self._stream)
        is_passed = not_before is None or not_before.query()
        return partial(self._scatter, slot, move, None if is_passed else not_before)

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """A context that makes this device the calling thread's current one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.device(self._device)

    def make_stream_wait(self, slot: int) -> None:
        """Make work queued on the current stream from now on wait for the slot's last copy."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done[slot])

    def is_done(self, slot: int) -> bool:
        """Whether the slot's last copy is done. On any thread."""
        return self._stream is None or bool(self._done[slot].query())

    def when_done(self, slot: int, after: Callable[[], None]) -> None:
        """Call `after` when the slot's last copy is done: on a thread that this object owns and that ends with it; on a
        CPU within this call."""
        if self._stream is None:
            after()
            return
        self._watch.add(self._done[slot], after)

    def warm_up(self, kinds: Iterable[Rows], gathers: bool) -> None:
        """Compile the GPU kernels that copies of such rows need, using slot 0 and the null block. gathers: those of
        gathers, with checksums; otherwise those of scatters. Call once, before the first copy and before CUDA graphs
        are captured, hence on the stream for that."""
        if self._stream is None:
            return
        later, self._stream = self._stream, side_stream(self._device)
        for rows in kinds:
            if gathers:
                at = -(-rows.sent_bytes // CHECKSUM_BYTES) * CHECKSUM_BYTES
                self.gather(0, [0], rows, Checksums(at, tag=0))
            else:
                self.scatter(0, [0], rows, None)()
            self._stream.synchronize()
            if not gathers:
                block_checksums(self._staging.memory(0)[: rows.sent_bytes].view(1, rows.sent_bytes))
        self._stream = later

    def num_damaged(self, slot: int, header: PartHeader) -> int:
        """How many of the pieces in the slot, of which there is at least one, differ from their checksums. header: the
        part's, already checked. Waits some tens of microseconds for a GPU."""
        memory, checksums = self._staging.memory(slot), header.checksums
        assert checksums is not None
        with self._staging.reading():
            rows = memory[: header.payload_bytes].view(header.num_pieces, header.piece_bytes)
            sent = memory[checksums.at :][: header.num_pieces * CHECKSUM_BYTES].view(torch.int64)
            return int((block_checksums(rows) ^ checksums.tag != sent).sum())

    def _gather(self, slot: int, ids: Sequence[int], rows: Rows, checksums: Checksums | None, memory: Tensor) -> None:
        pool, moves = self._take_rows(slot, ids, rows)
        num_rows = len(ids)
        moves.gather(self._ids[slot], num_rows, rows.offset, rows.row_bytes, memory, self._stream)()
        if checksums is None:
            return
        with torch.cuda.stream(self._stream):
            if rows.is_converted:
                sent = memory[: num_rows * rows.sent_bytes].view(num_rows, rows.sent_bytes)
                sums = block_checksums(sent, None)
            else:
                pieces = pool[:, rows.offset : rows.offset + rows.row_bytes]
                sums = block_checksums(pieces, self._ids[slot][:num_rows])
            sums ^= checksums.tag
            memory[checksums.at :][: sums.nbytes].view(torch.int64).copy_(sums)  # which may be on the peer's device

    def _uploaded_ids(self, slot: int, num_ids: int) -> Tensor:
        """The slot's ids in the device's memory, for work that is queued from now on."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._device_ids[slot][:num_ids].copy_(self._ids[slot][:num_ids], non_blocking=True)
        return self._device_ids[slot]

    def _take_rows(self, slot: int, ids: Sequence[int], rows: Rows) -> tuple[Tensor, PoolMoves | QuantizingMoves]:
        """Write the ids into the slot's entry. Returns the pool viewed as such rows, and its moves."""
        self._numbers[slot][: len(ids)] = ids
        key = rows.per_block, rows.is_converted
        if (view := self._views.get(key)) is None:
            pool = self._pool.view(len(self._pool) * rows.per_block, -1)
            view = self._views[key] = pool, self._quantizing(pool) if rows.is_converted else PoolMoves(pool)
        return view

    def _quantizing(self, pool: Tensor) -> QuantizingMoves:
        layer = self._layout.layers[0]
        return QuantizingMoves(pool, getattr(torch, layer.dtype), self._layout.block_size, layer.head_dim_k)

    def _scatter(self, slot: int, move: Move, not_before: Mark) -> None:
        if not_before is not None:
            self._stream.wait_event(not_before)
        move()
        self._launched(slot)

    def _launched(self, slot: int) -> AsyncOperation:
        if self._stream is None:
            return DONE
        done = self._done[slot]
        done.record(self._stream)
        return CudaEventOperation(done)


def _nothing() -> None:
    """The copy for a part whose blocks have no layer in its slice."""
