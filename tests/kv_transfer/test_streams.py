"""Movers beside a GPU's steps: copies wait for nothing that they need not wait for, and nothing that needs them goes
before. Each wait that is left out makes one of these fail: what should have waited is held up by a second's sleep."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from kv_transfer.memory import MemoryHub, MemoryTransport
from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver, PartArrived
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 2_000_000_000
"""A second, more or less."""
WAIT_S = 20.0
NUM_BLOCKS, PART_BLOCKS = 16, 4
LAYER_BYTES = BLOCK_BYTES // LAYOUT.num_layers


class Pair:
    """A sender and a receiver on one GPU, over `memory`. The sender's blocks are full of their numbers."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.woken = threading.Event()
        pool = torch.arange(NUM_BLOCKS, dtype=torch.uint8, device="cuda")[:, None].repeat(1, BLOCK_BYTES)
        self.source, self.target = pool, torch.full_like(pool, 99)
        self.sender = self._mover(KvSender, "sender", self.source)
        self.receiver = self._mover(KvReceiver, "receiver", self.target)
        self.link("sender", self.sender, self.receiver)
        self.link("receiver", self.receiver, self.sender)
        for mover in (self.sender, self.receiver):
            mover.warm_up()
        torch.cuda.synchronize()

    def _mover(self, kind: Any, name: str, pool: torch.Tensor) -> Any:
        staging = Staging(4, slot_bytes_for(PART_BLOCKS, BLOCK_BYTES), "cuda:0")
        transport = MemoryTransport(self.hub, name, staging, self.woken.set)
        return kind(transport, staging, pool, LAYOUT)

    def link(self, name: str, mover: Any, other: Any) -> None:
        other._transport.connect(name, mover._transport.info())

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline
            os.sched_yield()

    def pushed(self) -> bool:
        """Whether the part has left for the transport, which the thread of the copies sees to."""
        return bool(self.hub.pending)

    def arrive(self, blocks: list[int]) -> PartArrived:
        """A part of these blocks, in a slot of the receiver."""
        assert self.receiver.expect("sender", 1, 0)
        assert self.sender.send("receiver", 1, 0, blocks)
        self.until(self.pushed)
        return self.deliver()[0]

    def deliver(self) -> list[PartArrived]:
        """All that was pushed arrives, and is there as after a real transport's event."""
        self.hub.deliver_all()
        torch.cuda.synchronize()
        arrived = self.receiver.poll()
        assert all(isinstance(event, PartArrived) for event in arrived)
        return list(arrived)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()
    torch.cuda.synchronize()


def a_step_runs() -> torch.cuda.Event:
    """Something long on the current stream; the event is passed when it ends."""
    torch.cuda._sleep(SLEEP_CYCLES)
    ended = torch.cuda.Event()
    ended.record()
    return ended


def hold_up_copies(mover: Any, cycles: int = SLEEP_CYCLES) -> None:
    with torch.cuda.stream(mover._copies._stream):
        torch.cuda._sleep(cycles)


def test_a_part_leaves_while_a_step_runs(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 1, 0)
    ended = a_step_runs()
    assert pair.sender.send("receiver", 1, 0, [5, 3])
    pair.until(pair.pushed)
    assert not ended.query(), "the part waited for the step"


def test_what_comes_after_a_gather_does_not_change_what_it_copied(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 1, 0)
    hold_up_copies(pair.sender)
    assert pair.sender.send("receiver", 1, 0, [5, 3])
    pair.source.fill_(77)  # the blocks are another request's now
    pair.until(pair.pushed)
    (arrived,) = pair.deliver()
    pair.receiver.land(arrived, [8, 9])
    assert pair.target[[8, 9], 0].tolist() == [5, 3]


def test_the_transport_gets_a_slot_only_when_it_is_filled(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 1, 0)
    hold_up_copies(pair.sender)
    assert pair.sender.send("receiver", 1, 0, [7])
    assert not pair.pushed()
    pair.until(pair.pushed)
    push = pair.hub.pending[0].push
    assert int(push.owner.staging.memory(push.slot)[0]) == 7


def test_a_part_lands_while_a_step_runs(pair: Pair) -> None:
    arrived = pair.arrive([5, 3])
    ended = a_step_runs()
    pair.receiver.land(arrived, [8, 9])
    pair.until(lambda: pair.receiver.num_free_slots == 4)
    assert not ended.query(), "the scatter waited for the step"


def test_a_step_that_is_launched_after_a_scatter_finds_the_blocks_filled(pair: Pair) -> None:
    arrived = pair.arrive([5, 3])
    hold_up_copies(pair.receiver)
    pair.receiver.land(arrived, [8, 9])
    assert pair.target[[8, 9], 0].tolist() == [5, 3]


def test_a_scatter_comes_after_what_earlier_owners_of_the_blocks_queued(pair: Pair) -> None:
    arrived = pair.arrive([5, 3])
    a_step_runs()
    pair.target.fill_(66)  # a copy into a block that was given up before it ran
    granted = pair.receiver.mark()
    pair.receiver.land(arrived, [8, 9], not_before=granted)
    torch.cuda.synchronize()
    assert pair.target[[7, 8, 9], 0].tolist() == [66, 5, 3]


def test_a_slot_is_free_only_when_its_part_has_landed(pair: Pair) -> None:
    arrived = pair.arrive([5])
    hold_up_copies(pair.receiver)
    pair.receiver.land(arrived, [8])
    assert pair.receiver.num_free_slots == 3
    pair.receiver.check_integrity()
    pair.woken.clear()
    pair.until(lambda: pair.receiver.num_free_slots == 4)
    assert pair.woken.wait(WAIT_S), "nobody was told of the free slot"


def test_slots_serve_part_after_part_while_copies_are_held_up(pair: Pair) -> None:
    """What a slot has for its copies, block ids and an event, is not used anew too early."""
    rng = random.Random(5)
    wanted = pair.target[:, 0].tolist()
    for lease in range(1, 13):
        hold_up_copies(pair.sender, SLEEP_CYCLES // 500)
        targets = rng.sample(range(NUM_BLOCKS), 8)
        sources = [rng.randrange(NUM_BLOCKS) for _ in targets]
        for part in range(4):
            assert pair.receiver.expect("sender", lease, part)
            assert pair.sender.send("receiver", lease, part, sources[2 * part : 2 * part + 2])
        pair.until(lambda: len(pair.hub.pending) == 4)
        arrived = pair.deliver()
        hold_up_copies(pair.receiver, SLEEP_CYCLES // 500)
        for event in arrived:
            pair.receiver.land(event, targets[2 * event.part : 2 * event.part + 2])
        for source, target in zip(sources, targets, strict=True):
            wanted[target] = source
        assert pair.target[:, 0].tolist() == wanted
        assert len(pair.sender.poll()) == 4
        pair.until(lambda: pair.receiver.num_free_slots == 4)


def test_layers_travel_with_checksums_and_damage_is_seen(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 2, 0)
    assert pair.receiver.expect("sender", 2, 1)
    for part in range(2):
        assert pair.sender.send("receiver", 2, part, [5, 3], part * LAYER_BYTES, LAYER_BYTES, True)
    pair.until(lambda: len(pair.hub.pending) == 2)
    first, second = pair.deliver()
    pair.receiver.land(first, [8, 9], 0, LAYER_BYTES)
    pair.receiver._staging.memory(second.slot)[17] ^= 4
    torch.cuda.synchronize()
    with pytest.raises(TransferError, match="1 of 2 blocks"):
        pair.receiver.land(second, [8, 9], LAYER_BYTES, LAYER_BYTES)
    assert pair.receiver.num_damaged_pieces == 1
    assert pair.target[8, [0, LAYER_BYTES - 1, LAYER_BYTES]].tolist() == [5, 5, 99]
