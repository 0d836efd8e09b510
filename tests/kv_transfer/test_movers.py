"""Senders and receivers over the memory transport, raced: whatever is delivered, delayed, cut or killed, what lands is
what was sent, and every part and every slot is accounted for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from baton.errors import TransferError
from kv_transfer.memory import MemoryHub, MemoryTransport
from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver, PartArrived
from kv_transfer.sender import KvSender, PartFailed
from kv_transfer.staging import Staging
from kv_transfer.transport import PeerLost
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT

NUM_BLOCKS, PART_BLOCKS, NUM_SLOTS = 6, 2, 3
HALF = BLOCK_BYTES // 2
EXTENTS = ((0, BLOCK_BYTES), (0, HALF), (HALF, HALF))
"""Of each block: what a part carries."""
STEPS = 600


class Side:
    """A process with a mover. `halves` is what both halves of each block of a receiver's pool should be full of."""

    def __init__(self, hub: MemoryHub, name: str, is_sender: bool) -> None:
        self.name = name
        self.staging = Staging(NUM_SLOTS, slot_bytes_for(PART_BLOCKS, BLOCK_BYTES), "cpu")
        self.transport = MemoryTransport(hub, name, self.staging, lambda: None)
        self.pool = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        kind = KvSender if is_sender else KvReceiver
        self.mover = kind(self.transport, self.staging, self.pool, LAYOUT)
        self.halves = [[0, 0] for _ in range(NUM_BLOCKS)]
        self.open: set[tuple[str, int, int]] = set()  # parts without an end
        self.arrived: list[PartArrived] = []


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.hub = MemoryHub()
        self.serial = 0
        self.senders = [self.new(True), self.new(True)]
        self.receivers = [self.new(False), self.new(False)]
        self.granted: list[tuple[Side, Side, int]] = []  # posted and not sent: receiver, sender, lease
        self.content: dict[int, list[int]] = {}  # lease -> value of each block when it was sent
        self.extent: dict[int, tuple[int, int]] = {}  # lease -> bytes of each block
        self.damaged: set[int] = set()  # leases
        self.counts: Counter[str] = Counter()

    def new(self, is_sender: bool) -> Side:
        self.serial += 1
        return Side(self.hub, f"side-{self.serial}", is_sender)

    def pair(self) -> tuple[Side, Side]:
        return self.rng.choice(self.senders), self.rng.choice(self.receivers)

    # ---- what may happen ----

    def grant(self) -> None:
        """Connect, if they are not, and post a receive."""
        sender, receiver = self.pair()
        sender.transport.connect(receiver.name, receiver.transport.info())
        receiver.transport.connect(sender.name, sender.transport.info())
        self.serial += 1
        if receiver.mover.expect(sender.name, self.serial, 0):
            receiver.open.add((sender.name, self.serial, 0))
            self.granted.append((receiver, sender, self.serial))

    def send(self) -> None:
        if not self.granted:
            return
        receiver, sender, lease = grant = self.rng.choice(self.granted)
        source = self.rng.sample(range(NUM_BLOCKS), self.rng.randint(0, PART_BLOCKS))
        values = [self.rng.randint(1, 200) for _ in source]
        for block, value in zip(source, values, strict=True):
            sender.pool[block] = value
        extent = self.extent[lease] = self.rng.choice(EXTENTS)
        checked = self.rng.random() < 0.5
        if source:
            sent = sender.mover.send(receiver.name, lease, 0, source, *extent, checked)
        else:
            sent = sender.mover.drain(receiver.name, lease, 0)
        sender.pool[source] = 255  # its blocks serve others at once
        if sent:
            self.content[lease] = values
            sender.open.add((receiver.name, lease, 0))
            self.granted.remove(grant)

    def deliver(self) -> None:
        if self.hub.pending:
            self.hub.deliver(self.rng.randrange(len(self.hub.pending)))

    def damage_header(self) -> None:
        """A bit of a header falls over on the way: the part has failed, and nothing of it may be landed."""
        if self.hub.pending:
            push = self.rng.choice(self.hub.pending).push
            header = bytearray(push.header)
            header[self.rng.randrange(len(header))] ^= 1 << self.rng.randrange(8)
            push.header = bytes(header)

    def poll(self) -> None:
        side = self.rng.choice(self.senders + self.receivers)
        for event in side.mover.poll():
            self.counts[type(event).__name__] += 1
            if not isinstance(event, PeerLost):
                side.open.remove((event.peer, event.lease, event.part))  # exactly one end for each
            if isinstance(event, PartArrived):
                side.arrived.append(event)
                self.damage(side, event)

    def damage(self, side: Side, part: PartArrived) -> None:
        """Now and then a bit of a checked part falls over on the way."""
        if part.header.checked and self.rng.random() < 0.2:
            place = self.rng.randrange(part.header.message_bytes)
            side.staging.memory(part.slot)[place] ^= 1 << self.rng.randrange(8)
            self.damaged.add(part.lease)

    def land(self) -> None:
        side = self.rng.choice(self.receivers)
        if not side.arrived:
            return
        part = side.arrived.pop(self.rng.randrange(len(side.arrived)))
        values = self.content[part.lease]
        assert part.drained == (not values)
        extent = self.extent[part.lease]
        way = self.rng.choice(["land", "land", "discard", "refuse", "refuse extent"])
        if way == "refuse":
            with pytest.raises(TransferError):
                side.mover.land(part, list(range(len(values) + 1)), *extent)
        elif way == "refuse extent":
            with pytest.raises(TransferError):
                side.mover.land(part, list(range(len(values))), *self.rng.choice([e for e in EXTENTS if e != extent]))
        elif part.lease in self.damaged and way == "land":
            with pytest.raises(TransferError, match="damaged"):
                side.mover.land(part, list(range(len(values))), *extent)
            self.counts["damaged"] += 1
        elif part.drained or way == "discard":
            side.mover.discard(part)
        else:
            target = self.rng.sample(range(NUM_BLOCKS), len(values))
            assert side.mover.land(part, target, *extent) == len(values) * extent[1]
            for block, value in zip(target, values, strict=True):
                for half in range(extent[0] // HALF, sum(extent) // HALF):
                    side.halves[block][half] = value
            self.counts["landed"] += 1

    def disconnect(self) -> None:
        one, other = self.rng.sample(self.pair(), 2)
        one.transport.disconnect(other.name)

    def kill(self) -> None:
        sides = self.rng.choice([self.senders, self.receivers])
        dead = sides.pop(self.rng.randrange(len(sides)))
        self.hub.kill(dead.name)
        self.granted = [g for g in self.granted if dead not in g]
        sides.append(self.new(sides is self.senders))

    # ---- what must hold ----

    def check(self) -> None:
        for side in self.senders + self.receivers:
            side.mover.check_integrity()
        for side in self.receivers:
            halves = torch.tensor(side.halves, dtype=torch.uint8)
            assert side.pool.view(NUM_BLOCKS, 2, HALF).eq(halves[:, :, None]).all()

    def close(self) -> None:
        """Every part has its end and every slot is free."""
        for side in self.senders + self.receivers:
            side.transport.close()
            for event in side.mover.poll():
                if isinstance(event, PartArrived):
                    side.arrived.append(event)
                if not isinstance(event, PeerLost):
                    side.open.remove((event.peer, event.lease, event.part))
            for part in side.arrived:
                side.mover.discard(part)
            assert not side.open
            assert side.mover.num_free_slots == NUM_SLOTS


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_only_what_was_sent_lands(seed: int) -> None:
    world = World(seed)
    usual = [world.grant, world.send, world.deliver, world.poll, world.land]
    for step in range(STEPS):
        faults = [world.disconnect, world.kill, world.damage_header] if step % 12 == 0 else []
        world.rng.choice(usual + faults)()
        world.check()
    assert world.counts["landed"] > 3
    assert world.counts[PartFailed.__name__] > 0
    world.close()


def test_who_asks_for_checksums_takes_no_part_without(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    receiver.mover.verify = True
    for lease, checked in ((1, False), (2, True)):
        assert receiver.mover.expect(sender.name, lease, 0)
        assert sender.mover.send(receiver.name, lease, 0, [3], 0, HALF, checked)
    sender.transport.hub.deliver_all()
    plain, checked_part = receiver.mover.poll()
    with pytest.raises(TransferError, match="no checksums"):
        receiver.mover.land(plain, [2], 0, HALF)
    receiver.mover.land(checked_part, [2], 0, HALF)
    assert receiver.mover.num_damaged_pieces == 0
    assert receiver.mover.num_free_slots == NUM_SLOTS


def test_a_part_of_more_bytes_than_a_slot_holds_is_refused(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    with pytest.raises(TransferError, match=f"{PART_BLOCKS} blocks at most"):
        sender.mover.send(receiver.name, 1, 0, list(range(5)), 0, HALF)
    assert sender.mover.num_free_slots == NUM_SLOTS


@pytest.fixture
def hub_pair() -> tuple[Side, Side]:
    hub = MemoryHub()
    sender, receiver = Side(hub, "sender", True), Side(hub, "receiver", False)
    sender.transport.connect(receiver.name, receiver.transport.info())
    receiver.transport.connect(sender.name, sender.transport.info())
    return sender, receiver
