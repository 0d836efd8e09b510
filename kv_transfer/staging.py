"""Staging slots: the only memory that the network touches."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.audit import KvSlot


class SlotState(enum.Enum):
    """
    FREE --take--> HELD --lend--> IN_FLIGHT --reclaim--> HELD --give_back--> FREE
    """

    FREE = "free"
    HELD = "held"  # owned by the mover
    IN_FLIGHT = "in_flight"  # owned by the transport


class SlotOwner(NamedTuple):
    """The part that occupies a slot."""

    peer: str
    lease: int
    part: int


NOBODY = SlotOwner("", 0, 0)


class Staging:
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
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.device = torch.device(device)
        self._allocate = allocate or partial(torch.empty, dtype=torch.uint8, device=self.device)
        self._memory: list[Tensor] = list(self._allocate(num_slots * slot_bytes).view(num_slots, slot_bytes))
        self._states = [SlotState.FREE] * num_slots
        self._owners = [NOBODY] * num_slots
        self._clock = clock
        self._since_s = [clock()] * num_slots
        self._free = deque(range(num_slots))
        self._retired: deque[tuple[Tensor, Callable[[], bool]]] = deque()
        self._exchange = threading.Lock()  # guards the memory, which `renew` replaces on another thread
        self._reads: Any = None
        if self.device.type == "cuda":
            self._reads = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def is_exportable(self) -> bool:
        """Whether other processes can map the slots (CUDA IPC), which PyTorch's expandable segments prevent."""
        if self.device.type != "cuda":
            return True
        address = self._memory[0].data_ptr()
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        mine = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
        return not any(segment.get("is_expandable", False) for segment in mine)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def take(self, owner: SlotOwner = NOBODY) -> int | None:
        """A free slot for `owner`, now held by the caller: the one free for longest. None: no slot is free."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._move(slot, SlotState.FREE, SlotState.HELD)
        self._belongs(slot, owner)
        return slot

    def lend(self, slot: int) -> None:
        """Pass the slot to the transport, until an event names it."""
        self._move(slot, SlotState.HELD, SlotState.IN_FLIGHT)

    def reclaim(self, slot: int) -> None:
        """An event named the slot: the mover owns it again."""
        self._move(slot, SlotState.IN_FLIGHT, SlotState.HELD)

    def give_back(self, slot: int) -> None:
        self._move(slot, SlotState.HELD, SlotState.FREE)
        self._belongs(slot, NOBODY)
        self._free.append(slot)

    def audit(self) -> list[KvSlot]:
        """Every slot, its state and owner, and for how long."""
        now = self._clock()
        return [
            KvSlot(slot, self._states[slot].value, *self._owners[slot], now - self._since_s[slot])
            for slot in range(self.num_slots)
        ]

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
        """The transport is closed: nothing can touch the retired memory any more."""
        with self._exchange:
            self._retired.clear()

    def check_integrity(self) -> None:
        """Assert that the free list matches the states, and that each slot has memory of its own."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        free = {slot for slot, state in enumerate(self._states) if state is SlotState.FREE}
        assert set(self._free) == free, f"free list {sorted(self._free)}, states say {sorted(free)}"
        with self._exchange:
            used = [m.data_ptr() for m in self._memory] + [m.data_ptr() for m, _ in self._retired]
        assert len(set(used)) == len(used), "two slots share memory, or one uses retired memory"

    def _belongs(self, slot: int, owner: SlotOwner) -> None:
        self._owners[slot], self._since_s[slot] = owner, self._clock()

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        assert self._states[slot] is before, f"slot {slot} is {self._states[slot].value}, not {before.value}"
        self._states[slot] = after
