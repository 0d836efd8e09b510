"""Staging slots and their states, without their memory, which simulated nodes do not have."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Slots:
    """`num_slots` slots of `slot_bytes`. Owned by the mover and used by one thread at a time, except `renew`.

    These slots have no memory, since simulated transfers only take time; those of `Staging` have.
    """

    def __init__(self, num_slots: int, slot_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._states = [SlotState.FREE] * num_slots
        self._owners = [NOBODY] * num_slots
        self._clock = clock
        self._since_s = [clock()] * num_slots
        self._free = deque(range(num_slots))
        self.num_freed = 0
        """How many times slots have become free so far."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def take(self, owner: SlotOwner = NOBODY) -> int | None:
        """Take a free slot for `owner`, the one that has been free for longest. None: no slot is free."""
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
        self.num_freed += 1

    def audit(self) -> list[KvSlot]:
        """Every slot, its state and owner, and for how long."""
        now = self._clock()
        return [
            KvSlot(slot, self._states[slot].value, *self._owners[slot], now - self._since_s[slot])
            for slot in range(self.num_slots)
        ]

    def memory(self, slot: int) -> Any:
        """The slot's memory, if it has any."""
        return None

    def renew(self, slot: int, is_over: Callable[[], bool] = lambda: True) -> None:
        """Give a slot in flight other memory. Called by the transport, on its thread, before it reports Failed."""
        assert self._states[slot] is SlotState.IN_FLIGHT

    def forget_retired(self) -> None:
        """The transport is closed, so nothing can touch memory that slots had before."""

    def check_integrity(self) -> None:
        """Assert that the free list matches the states."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        free = {slot for slot, state in enumerate(self._states) if state is SlotState.FREE}
        assert set(self._free) == free, f"free list {sorted(self._free)}, states say {sorted(free)}"

    def _belongs(self, slot: int, owner: SlotOwner) -> None:
        self._owners[slot], self._since_s[slot] = owner, self._clock()

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        assert self._states[slot] is before, f"slot {slot} is {self._states[slot].value}, not {before.value}"
        self._states[slot] = after
