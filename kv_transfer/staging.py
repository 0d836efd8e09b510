"""Staging slots: the only memory that the network touches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton_kernels.streams import side_stream
from kv_transfer.slots import NOBODY, SlotOwner, Slots, SlotState

__all__ = ["NOBODY", "SlotOwner", "SlotState", "Staging"]


class Staging(Slots):
    """`num_slots` slots of `slot_bytes`, on the device of the KV pool. Owned by the mover and used by one thread at a
    time, except `renew`.

    The slots start as rows of one tensor [num_slots, slot_bytes], uint8. A slot whose transfer failed gets other memory
    (`renew`), since a disconnected peer may write to, or read from, the old memory at any later time. allocate: returns
    [num_bytes], uint8, on that device, if a special kind of memory is needed.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device | str,
        clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__(num_slots, slot_bytes, clock)
        self.device = torch.device(device)
        self._allocate = allocate or partial(torch.empty, dtype=torch.uint8, device=self.device)
        self._memory: list[Tensor] = list(self._allocate(num_slots * slot_bytes).view(num_slots, slot_bytes))
        self._retired: deque[tuple[Tensor, Callable[[], bool]]] = deque()
        self._exchange = threading.Lock()  # guards the memory, which `renew` replaces on another thread
        self._reads: Any = None
        if self.device.type == "cuda":
            self._reads = side_stream(self.device)

    @property
    def is_exportable(self) -> bool:
        """Whether other processes can map the slots (CUDA IPC), which PyTorch's expandable segments prevent."""
        if self.device.type != "cuda":
            return True
        address = self._memory[0].data_ptr()
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        mine = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
        return not any(segment.get("is_expandable", False) for segment in mine)

    def memory(self, slot: int) -> Tensor:
        """[slot_bytes], uint8. Call again for each transfer, since `renew` replaces it."""
        return self._memory[slot]

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """A context for reading slots that arrived: on a GPU, without waiting for work queued on the current stream."""
        return torch.cuda.stream(self._reads) if self._reads else contextlib.nullcontext()

    def renew(self, slot: int, is_over: Callable[[], bool] = lambda: True) -> None:
        """Give a slot in flight other memory. Called by the transport, on its thread, before it reports Failed.

        The old memory is retired. It is reused once `num_slots` others were retired after it and `is_over` reports that
        the native operation on it is complete. So failures at most double the memory, unless operations never complete.
        """
        assert self._states[slot] is SlotState.IN_FLIGHT
        with self._exchange:
            self._retired.append((self._memory[slot], is_over))
            self._memory[slot] = self._fresh()

    def _fresh(self) -> Tensor:
        for i in range(len(self._retired) - self.num_slots):
            memory, is_over = self._retired[i]
            if is_over():
                del self._retired[i]
                return memory
        return self._allocate(self.slot_bytes)

    def forget_retired(self) -> None:
        """The transport is closed, so nothing can touch the retired memory any more."""
        with self._exchange:
            self._retired.clear()

    def check_integrity(self) -> None:
        """Assert that the free list matches the states, and that each slot has memory of its own."""
        super().check_integrity()
        with self._exchange:
            used = [m.data_ptr() for m in self._memory] + [m.data_ptr() for m, _ in self._retired]
        assert len(set(used)) == len(used), "two slots share memory, or one uses retired memory"
