"""Parts between a sender and a receiver: what lands, what is refused, and in which order it is copied and announced."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from baton.layout import KvSlice
from baton_kernels.block_copy import Move
from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.parts import PartHeader
from kv_transfer.receiver import PartLanded, PartRefused, PartUnused
from kv_transfer.sender import KvSender
from tests.kv_transfer.mover_sides import NUM_SLOTS, PART_BLOCKS, Side
from tests.kv_transfer.rig_node import BLOCK_BYTES, DEADLINE_S

HALF = BLOCK_BYTES // 2
FIRST_LAYER, SECOND_LAYER = KvSlice(0, 1, 0, 2), KvSlice(1, 2, 0, 2)
"""The halves of each block."""


def test_who_asks_for_checksums_takes_no_part_without(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    receiver.mover.verify = True
    sender.pool[3, HALF:] = 7  # not what the first half has
    for lease, checked in ((1, False), (2, True)):
        assert receiver.mover.expect(sender.name, lease, 0, [2], SECOND_LAYER)
        assert sender.mover.send(receiver.name, lease, 0, [3], SECOND_LAYER, checked)
    sender.transport.hub.deliver_all()
    plain, checked_part = receiver.mover.poll()
    assert isinstance(plain, PartRefused)
    assert "no checksums" in plain.error.message
    assert checked_part == PartLanded(sender.name, 2, 0, HALF)
    assert receiver.mover.num_damaged_pieces == 0
    assert receiver.mover.num_free_slots == NUM_SLOTS


@pytest.mark.parametrize("came", [[1, 0], [0, 0]])
def test_what_is_whole_but_of_another_part_has_the_wrong_checksums(
    hub_pair: tuple[Side, Side], came: list[int]
) -> None:
    """came: whose bytes come with the headers of two parts: they are exchanged, or the second part's never come, and
    the slot has those of an earlier one."""
    sender, receiver = hub_pair
    for part in range(2):
        sender.pool[part] = 1 + part
        assert receiver.mover.expect(sender.name, 1, part, [2 + part])
        assert sender.mover.send(receiver.name, 1, part, [part], checked=True)
    sent = [sender.staging.memory(slot).clone() for slot in range(2)]
    for slot, part in enumerate(came):
        sender.staging.memory(slot).copy_(sent[part])
    sender.transport.hub.deliver_all()
    right = [part for part in range(2) if came[part] == part]
    assert [event.part for event in receiver.mover.poll() if isinstance(event, PartLanded)] == right
    assert receiver.mover.num_damaged_pieces == 2 - len(right)
    assert receiver.pool[2:4, 0].tolist() == [1 if 0 in right else 0, 0]


def test_a_part_that_is_under_way_when_its_lease_ends_touches_no_block(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    for lease in (1, 2):
        assert receiver.mover.expect(sender.name, lease, 0, [lease])
        sender.pool[3] = lease
        assert sender.mover.send(receiver.name, lease, 0, [3])
    receiver.mover.withdraw(1)
    sender.transport.hub.deliver_all()
    assert receiver.mover.poll() == [PartUnused(sender.name, 1, 0), PartLanded(sender.name, 2, 0, BLOCK_BYTES)]
    assert receiver.pool[:, 0].tolist() == [0, 0, 2, 0, 0, 0]


def test_what_landed_before_its_lease_ended_is_not_landed_again(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    assert receiver.mover.expect(sender.name, 1, 0, [4])
    sender.pool[3] = 1
    assert sender.mover.send(receiver.name, 1, 0, [3])
    sender.transport.hub.deliver_all()
    assert int(receiver.pool[4, 0]) == 1  # and the engine has not heard of it
    receiver.mover.withdraw(1)
    receiver.pool[4] = 77  # the block is another's
    assert receiver.mover.poll() == [PartLanded(sender.name, 1, 0, BLOCK_BYTES)]
    assert receiver.pool[4].unique().tolist() == [77]


def test_copies_are_prepared_in_advance_until_parts_come(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    copies, prepared = receiver.mover._copies, []
    scatter = copies.scatter

    def seen(*where: Any) -> Move:
        prepared.append(where[-1])
        return scatter(*where)

    monkeypatch.setattr(copies, "scatter", seen)
    for part in (0, 1):
        assert receiver.mover.expect(sender.name, 1, part, [part])
    assert sender.mover.send(receiver.name, 1, 0, [0])
    sender.transport.hub.deliver_all()
    assert receiver.mover.expect(sender.name, 1, 2, [2], is_last=True)
    assert receiver.mover.expect(sender.name, 2, 0, [3], is_last=True)
    assert prepared == [True, True, False, True]


class Device:
    """Copies that are under way, to slots at a peer, and a transport; `said` is what happened, in order."""

    def __init__(self, sender: KvSender, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.error = ""
        memory = torch.zeros(sender.part_blocks * BLOCK_BYTES, dtype=torch.uint8)
        self._target = RemoteSlot(
            memory, announce=lambda header: self.said.append(f"say {PartHeader.parse(header).part}")
        )
        monkeypatch.setattr(sender._copies, "gather", self._gather)
        monkeypatch.setattr(sender.transport, "acquire_remote_slot", lambda *_: self._target)
        monkeypatch.setattr(sender.transport, "push", self._push)

    def _gather(self, slot: int, blocks: list[int], *_: Any) -> AsyncOperation:
        self.said.append(f"copy {blocks[0]}")
        return self

    def _push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, *_: Any) -> None:
        self.said.append(f"push {PartHeader.parse(header).part}")

    def query(self) -> bool:
        return False


def test_copies_of_what_is_sent_together_begin_before_any_but_the_first_is_announced(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    assert isinstance(sender.mover, KvSender)
    device = Device(sender.mover, monkeypatch)
    with sender.mover.batched():
        for part in (0, 1):
            assert sender.mover.send(receiver.name, 1, part, [part])
        assert sender.mover.send("another", 1, 2, [2])
    assert device.said == ["copy 0", "say 0", "copy 1", "copy 2", "say 2", "say 1", "push 0", "push 1", "push 2"]


def test_a_part_that_is_sent_alone_is_announced_and_pushed_at_once(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    assert isinstance(sender.mover, KvSender)
    device = Device(sender.mover, monkeypatch)
    assert sender.mover.send(receiver.name, 1, 2, [2])
    assert device.said == ["copy 2", "say 2", "push 2"]


def test_a_lease_does_not_end_in_the_midst_of_a_landing(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    copies, is_landing, go_on = receiver.mover._copies, threading.Event(), threading.Event()
    scatter = copies.scatter

    def scatter_slowly(*where: Any) -> Move:
        move = scatter(*where)

        def slow() -> None:
            is_landing.set()
            assert go_on.wait(DEADLINE_S)
            move()

        return slow

    monkeypatch.setattr(copies, "scatter", scatter_slowly)

    def end() -> None:
        receiver.mover.withdraw(1)
        receiver.pool[4] = 77  # the block is another's

    assert receiver.mover.expect(sender.name, 1, 0, [4])
    assert sender.mover.send(receiver.name, 1, 0, [3])
    landing, ending = threading.Thread(target=sender.transport.hub.deliver_all), threading.Thread(target=end)
    landing.start()
    assert is_landing.wait(DEADLINE_S)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go_on.set()
    for thread in (landing, ending):
        thread.join(DEADLINE_S)
    assert receiver.pool[4].unique().tolist() == [77]
    assert receiver.mover.poll() == [PartLanded(sender.name, 1, 0, BLOCK_BYTES)]


def test_a_part_of_more_bytes_than_a_slot_holds_is_refused(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    with pytest.raises(TransferError, match=f"{PART_BLOCKS} blocks at most"):
        sender.mover.send(receiver.name, 1, 0, list(range(5)), FIRST_LAYER)
    assert sender.mover.num_free_slots == NUM_SLOTS
