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

from baton.layout import KvSlice
from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver, PartLanded, PartRefused
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transport import Listener, OperationEvent
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 2_000_000_000
"""A second, more or less."""
WAIT_S = 20.0
NUM_BLOCKS, PART_BLOCKS = 16, 4
LAYER_BYTES = BLOCK_BYTES // LAYOUT.num_layers


class WiredTransport(MemoryTransport):
    """Tells of what arrived when the bytes are there, as a real transport does, and not when their copy is queued."""

    wire: Any

    def subscribe(self, listener: Listener) -> None:
        def when_there(events: list[OperationEvent]) -> None:
            self.wire.synchronize()
            listener(events)

        super().subscribe(when_there)


class Pair:
    """A sender and a receiver on one GPU, over `memory`. The sender's blocks are full of their numbers. On `wire` bytes
    travel; the receiver is told of them when they are there, as by a real transport."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.wire: Any = torch.cuda.Stream()
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
        transport = WiredTransport(self.hub, name, staging, self.woken.set)
        transport.wire = self.wire
        return kind(transport, staging, pool, LAYOUT)

    def link(self, name: str, mover: Any, other: Any) -> None:
        other.transport.connect(name, mover.transport.info())

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline
            os.sched_yield()

    def pushed(self) -> bool:
        """Whether the part has left for the transport, which the thread of the copies sees to."""
        return bool(self.hub.pending)

    def push(self, sources: list[int], targets: list[int], not_before: Any = None) -> None:
        """A part that is to be delivered."""
        assert self.receiver.expect("sender", 1, 0, targets, not_before=not_before)
        assert self.sender.send("receiver", 1, 0, sources)
        self.until(self.pushed)

    def deliver(self) -> None:
        """All that was pushed arrives and lands, which the engine has not heard of yet."""
        with torch.cuda.stream(self.wire):
            self.hub.deliver_all()

    def hear(self) -> None:
        """The engine does."""
        assert [type(event) for event in self.receiver.poll()] == [PartLanded]


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()
    torch.cuda.synchronize()


def one_layer(index: int) -> KvSlice:
    return LAYOUT.whole._replace(layer_start=index, layer_end=index + 1)


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
    assert pair.receiver.expect("sender", 1, 0, [8, 9])
    ended = a_step_runs()
    assert pair.sender.send("receiver", 1, 0, [5, 3])
    pair.until(pair.pushed)
    assert not ended.query(), "the part waited for the step"


def test_what_comes_after_a_gather_does_not_change_what_it_copied(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 1, 0, [8, 9])
    hold_up_copies(pair.sender)
    assert pair.sender.send("receiver", 1, 0, [5, 3])
    pair.source.fill_(77)  # the blocks are another request's now
    pair.until(pair.pushed)
    pair.deliver()
    pair.hear()
    assert pair.target[[8, 9], 0].tolist() == [5, 3]


def test_the_transport_gets_a_slot_only_when_it_is_filled(pair: Pair) -> None:
    assert pair.receiver.expect("sender", 1, 0, [8])
    hold_up_copies(pair.sender)
    assert pair.sender.send("receiver", 1, 0, [7])
    assert not pair.pushed()
    pair.until(pair.pushed)
    push = pair.hub.pending[0].push
    assert int(push.owner.staging.memory(push.slot)[0]) == 7


def test_a_part_lands_while_a_step_runs(pair: Pair) -> None:
    pair.push([5, 3], [8, 9])
    ended = a_step_runs()
    pair.deliver()
    pair.until(lambda: pair.receiver.num_free_slots == 4)
    assert not ended.query(), "the scatter waited for the step"


def test_a_step_that_is_launched_after_a_scatter_finds_the_blocks_filled(pair: Pair) -> None:
    pair.push([5, 3], [8, 9])
    hold_up_copies(pair.receiver)
    pair.deliver()
    pair.hear()
    assert pair.target[[8, 9], 0].tolist() == [5, 3]


def test_what_is_queued_after_a_lease_ended_comes_after_what_had_landed_for_it(pair: Pair) -> None:
    pair.push([5, 3], [8, 9])
    hold_up_copies(pair.receiver)
    pair.deliver()
    pair.receiver.withdraw(1)  # and the engine has not heard of the part
    pair.target[8:10].fill_(66)
    torch.cuda.synchronize()
    assert pair.target[[8, 9], 0].tolist() == [66, 66]
    pair.hear()


def test_a_scatter_comes_after_what_earlier_owners_of_the_blocks_queued(pair: Pair) -> None:
    a_step_runs()
    pair.target.fill_(66)  # a copy into a block that was given up before it ran
    pair.push([5, 3], [8, 9], not_before=pair.receiver.mark())
    pair.deliver()
    torch.cuda.synchronize()
    assert pair.target[[7, 8, 9], 0].tolist() == [66, 5, 3]


def test_a_slot_is_free_only_when_its_part_has_landed(pair: Pair) -> None:
    pair.push([5], [8])
    hold_up_copies(pair.receiver)
    pair.deliver()
    assert pair.receiver.num_free_slots == 3
    pair.receiver.check_integrity()
    pair.until(lambda: pair.receiver.num_free_slots == 4)


def test_an_engine_that_waits_for_a_slot_is_told_when_the_copy_out_of_one_is_done(pair: Pair) -> None:
    for part in range(4):
        assert pair.receiver.expect("sender", 1, part, [8 + part]), "of more parts"
    assert pair.sender.send("receiver", 1, 0, [5])
    pair.until(pair.pushed)
    hold_up_copies(pair.receiver)
    pair.deliver()
    assert pair.receiver.num_free_slots == 0
    pair.woken.clear()
    assert pair.woken.wait(WAIT_S), "nobody was told of the free slot"
    assert pair.receiver.num_free_slots == 1


def test_slots_serve_part_after_part_while_copies_are_held_up(pair: Pair) -> None:
    """What a slot has for its copies, block ids and an event, is not used anew too early."""
    rng = random.Random(5)
    wanted = pair.target[:, 0].tolist()
    for lease in range(1, 13):
        hold_up_copies(pair.sender, SLEEP_CYCLES // 500)
        targets = rng.sample(range(NUM_BLOCKS), 8)
        sources = [rng.randrange(NUM_BLOCKS) for _ in targets]
        for part in range(4):
            assert pair.receiver.expect("sender", lease, part, targets[2 * part : 2 * part + 2])
            assert pair.sender.send("receiver", lease, part, sources[2 * part : 2 * part + 2])
        pair.until(lambda: len(pair.hub.pending) == 4)
        hold_up_copies(pair.receiver, SLEEP_CYCLES // 500)
        pair.deliver()
        assert len(pair.receiver.poll()) == 4
        for source, target in zip(sources, targets, strict=True):
            wanted[target] = source
        assert pair.target[:, 0].tolist() == wanted
        assert len(pair.sender.poll()) == 4
        pair.until(lambda: pair.receiver.num_free_slots == 4)


def test_a_part_expected_after_others_have_come_lands_as_they_did(pair: Pair) -> None:
    """Its ids are not uploaded: the copy reads them over the bus."""
    for part, (source, target) in enumerate([(5, 8), (3, 9), (6, 10)]):
        assert pair.receiver.expect("sender", 1, part, [target], is_last=part == 2)
        assert pair.sender.send("receiver", 1, part, [source])
        pair.until(pair.pushed)
        pair.deliver()
        assert len(pair.receiver.poll()) == 1
    assert pair.target[[8, 9, 10], 0].tolist() == [5, 3, 6]


def test_layers_travel_with_checksums_and_damage_is_seen(pair: Pair) -> None:
    for part in range(2):
        assert pair.receiver.expect("sender", 2, part, [8, 9], one_layer(part))
        assert pair.sender.send("receiver", 2, part, [5, 3], one_layer(part), True)
    pair.until(lambda: len(pair.hub.pending) == 2)
    push = pair.hub.pending[1].push
    push.owner.staging.memory(push.slot)[17] ^= 4
    torch.cuda.synchronize()
    pair.deliver()
    first, second = pair.receiver.poll()
    assert isinstance(first, PartLanded)
    assert isinstance(second, PartRefused)
    assert "1 of 2 pieces" in second.error.message
    assert pair.receiver.num_damaged_pieces == 1
    assert pair.target[8, [0, LAYER_BYTES - 1, LAYER_BYTES]].tolist() == [5, 5, 99]
