"""Slots and their memory, in every order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.audit import KvSlot
from kv_transfer.staging import NOBODY, SlotOwner, SlotState, Staging
from tests.machines import machine

SLOT_BYTES = 64


class StagingMachine(RuleBasedStateMachine):
    """Against a plain model: which slot is where, and which memory the network may still write to."""

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.now = 0.0
        self.staging = Staging(num_slots, SLOT_BYTES, "cpu", clock=lambda: self.now)
        self.owners = dict.fromkeys(range(num_slots), (NOBODY, 0.0))  # and since when
        self.state = dict.fromkeys(range(num_slots), SlotState.FREE)
        self.pending: list[list[Any]] = []  # [memory of a cut operation, whether it is over natively]
        self.total = 0
        self.most_unfinished = 0

    def slots(self, state: SlotState) -> list[int]:
        return [slot for slot, found in self.state.items() if found is state]

    @rule(lease=st.integers(1, 5))
    def take(self, lease: int) -> None:
        owner = SlotOwner("peer", lease, 7)
        slot = self.staging.take(owner)
        if slot is None:
            assert not self.slots(SlotState.FREE)
        else:
            assert self.state[slot] is SlotState.FREE
            self.state[slot] = SlotState.HELD
            self.owners[slot] = owner, self.now

    @precondition(lambda self: self.slots(SlotState.HELD))
    @rule(data=st.data(), lend=st.booleans())
    def pass_on(self, data: st.DataObject, lend: bool) -> None:
        slot = data.draw(st.sampled_from(self.slots(SlotState.HELD)))
        (self.staging.lend if lend else self.staging.give_back)(slot)
        self.state[slot] = SlotState.IN_FLIGHT if lend else SlotState.FREE
        if not lend:
            self.owners[slot] = NOBODY, self.now

    @precondition(lambda self: self.slots(SlotState.IN_FLIGHT))
    @rule(data=st.data(), cut=st.booleans(), over=st.booleans())
    def end_flight(self, data: st.DataObject, cut: bool, over: bool) -> None:
        slot = data.draw(st.sampled_from(self.slots(SlotState.IN_FLIGHT)))
        if cut:
            operation: list[object] = [self.staging.memory(slot), over]
            self.pending.append(operation)
            self.staging.renew(slot, lambda: bool(operation[1]))
            assert self.staging.memory(slot) is not operation[0]
            self.total += 1
        self.staging.reclaim(slot)
        self.state[slot] = SlotState.HELD

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.pending))[1] = True

    @precondition(lambda self: self.slots(SlotState.FREE) or self.slots(SlotState.IN_FLIGHT))
    @rule(data=st.data())
    def refuse_what_is_not_held(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots(SlotState.FREE) + self.slots(SlotState.IN_FLIGHT)))
        with pytest.raises(AssertionError, match="not held"):
            self.staging.give_back(slot)
        with pytest.raises(AssertionError, match="not held"):
            self.staging.lend(slot)

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "staging"):
            return
        self.staging.check_integrity()
        assert self.staging.num_free == len(self.slots(SlotState.FREE))
        assert all(self.staging.state(slot) is state for slot, state in self.state.items())
        unsafe = {memory.data_ptr() for memory, over in self.pending if not over}
        assert not unsafe & {self.staging.memory(slot).data_ptr() for slot in self.state}
        expected = [
            KvSlot(slot, state.value, *self.owners[slot][0], self.now - self.owners[slot][1])
            for slot, state in self.state.items()
        ]
        assert self.staging.audit() == expected
        self.now += 1

    @invariant()
    def retired_memory_is_bounded(self) -> None:
        if hasattr(self, "staging"):
            self.most_unfinished = max(self.most_unfinished, sum(not over for _, over in self.pending))
            assert len(self.staging._retired) <= self.staging.num_slots + self.most_unfinished + 1


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = machine(max_examples=60, steps=40)


def test_integrity_is_broken_by_a_slot_that_is_free_twice() -> None:
    staging = Staging(2, SLOT_BYTES, "cpu")
    staging._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        staging.check_integrity()


def test_integrity_is_broken_by_a_free_slot_that_is_in_flight() -> None:
    staging = Staging(2, SLOT_BYTES, "cpu")
    staging._states[1] = SlotState.IN_FLIGHT
    with pytest.raises(AssertionError, match="free list"):
        staging.check_integrity()


def test_the_slot_that_rested_longest_is_next() -> None:
    staging = Staging(3, SLOT_BYTES, "cpu")
    assert [staging.take(), staging.take()] == [0, 1]
    staging.give_back(1)
    staging.give_back(0)
    assert [staging.take(), staging.take(), staging.take(), staging.take()] == [2, 1, 0, None]


def test_retired_memory_rests_while_an_operation_uses_it_and_for_as_many_as_there_are_slots() -> None:
    staging, used, is_over = Staging(1, SLOT_BYTES, "cpu"), list[int](), False
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    for _ in range(3):
        used.append(staging.memory(slot).data_ptr())
        staging.renew(slot, lambda: is_over)
        assert staging.memory(slot).data_ptr() not in used
    is_over = True
    staging.renew(slot, lambda: is_over)
    assert staging.memory(slot).data_ptr() == used[0]
