"""Senders and receivers over the memory transport, raced: whatever is delivered, delayed, cut or killed, what lands is
what was sent, and every part and every slot is accounted for."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
import torch

from baton.layout import KvSlice
from kv_transfer.parts import PART_BITS, PartHeader
from kv_transfer.receiver import KvReceiver, PartLanded, PartRefused, PartUnused
from kv_transfer.sender import PartFailed
from kv_transfer.transport import PeerDisconnected
from kv_transfer.transports.memory import MemoryHub, Transfer
from tests.kv_transfer.mover_sides import NUM_BLOCKS, NUM_SLOTS, PART_BLOCKS, Side
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT

HALF = BLOCK_BYTES // 2
SLICES = (LAYOUT.whole, KvSlice(0, 1, 0, 2), KvSlice(1, 2, 0, 2))
"""Of each block: what a part carries, all or one of the two layers, which are its halves."""
STEPS = 600


class Grant(NamedTuple):
    """Where a part of a lease is to go: over this slice of these blocks."""

    receiver: Side
    sender: Side
    lease: int
    blocks: list[int]
    kv_slice: KvSlice


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.hub = MemoryHub()
        self.serial = 0
        self.senders = [self.new(True), self.new(True)]
        self.receivers = [self.new(False), self.new(False)]
        self.grants: dict[int, Grant] = {}  # by lease
        self.unsent: list[int] = []  # leases
        self.withdrawn: set[int] = set()  # leases
        self.content: dict[int, list[int]] = {}  # lease -> value of each block when it was sent
        self.headers: dict[int, bytes] = {}  # lease -> as it was sent
        self.flipped: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lease -> (byte, bit) on the way
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
        lease, blocks = self.serial, self.rng.sample(range(NUM_BLOCKS), self.rng.randint(1, PART_BLOCKS))
        kv_slice = self.rng.choice(SLICES)
        if receiver.mover.expect(sender.name, lease, 0, blocks, kv_slice):
            receiver.open.add((sender.name, lease, 0))
            self.grants[lease] = Grant(receiver, sender, lease, blocks, kv_slice)
            self.unsent.append(lease)

    def send(self) -> None:
        """What was granted, or nothing, or something else."""
        if not self.unsent:
            return
        receiver, sender, lease, blocks, kv_slice = self.grants[self.rng.choice(self.unsent)]
        way = self.rng.choice(["granted", "granted", "granted", "nothing", "other blocks", "other slice"])
        if way == "other slice":
            kv_slice = self.rng.choice([other for other in SLICES if other != kv_slice])
        num_blocks = len(blocks) if way != "other blocks" else PART_BLOCKS + 1 - len(blocks)
        source = self.rng.sample(range(NUM_BLOCKS), num_blocks)
        values = [self.rng.randint(1, 200) for _ in source]
        for block, value in zip(source, values, strict=True):
            sender.pool[block] = value
        checked = self.rng.random() < 0.5
        if way == "nothing":
            sent = sender.mover.drain(receiver.name, lease, 0)
        else:
            sent = sender.mover.send(receiver.name, lease, 0, source, kv_slice, checked)
        sender.pool[source] = 255  # its blocks serve others at once
        if sent:
            self.content[lease] = values
            sender.open.add((receiver.name, lease, 0))
            self.unsent.remove(lease)

    def withdraw(self) -> None:
        """A lease ends, sent or not, landed or not."""
        if self.grants:
            grant = self.rng.choice(list(self.grants.values()))
            grant.receiver.mover.withdraw(grant.lease)
            self.withdrawn.add(grant.lease)

    def deliver(self) -> None:
        if self.hub.pending:
            index = self.rng.randrange(len(self.hub.pending))
            self.foresee(self.hub.pending[index])
            self.hub.deliver(index)

    def foresee(self, transfer: Transfer) -> None:
        """What is to become of it, within its delivery."""
        lease = transfer.push.tag >> PART_BITS
        receiver, _, _, blocks, kv_slice = self.grants[lease]
        if transfer.push.header != self.headers.get(lease, transfer.push.header):
            receiver.outcome[lease] = PartRefused
            return
        header = PartHeader.parse(transfer.push.header)
        if header.drain or lease in self.withdrawn:
            receiver.outcome[lease] = PartUnused
        elif (header.num_blocks, header.kv_slice) != (len(blocks), kv_slice):
            receiver.outcome[lease] = PartRefused
        elif self.flipped[lease]:
            receiver.outcome[lease] = PartRefused
            self.counts["damaged"] += 1
        else:
            receiver.outcome[lease] = PartLanded
            for block, value in zip(blocks, self.content[lease], strict=True):
                for half in range(kv_slice.layer_start, kv_slice.layer_end):
                    receiver.halves[block][half] = value

    def damage_header(self) -> None:
        """A bit of a header falls over on the way."""
        if self.hub.pending:
            push = self.rng.choice(self.hub.pending).push
            self.headers.setdefault(push.tag >> PART_BITS, push.header)
            header = bytearray(push.header)
            header[self.rng.randrange(len(header))] ^= 1 << self.rng.randrange(8)
            push.header = bytes(header)

    def damage(self) -> None:
        """A bit of a checked part falls over on the way."""
        sound = [t.push for t in self.hub.pending if t.push.tag >> PART_BITS not in self.headers]
        if checked := [push for push in sound if PartHeader.parse(push.header).checked]:
            push = self.rng.choice(checked)
            place = self.rng.randrange(PartHeader.parse(push.header).message_bytes), self.rng.randrange(8)
            push.owner.staging.memory(push.slot)[place[0]] ^= 1 << place[1]
            self.flipped[push.tag >> PART_BITS] ^= {place}

    def poll(self) -> None:
        self.hear(self.rng.choice(self.senders + self.receivers))

    def hear(self, side: Side) -> None:
        for event in side.mover.poll():
            self.counts[type(event).__name__] += 1
            if isinstance(event, PeerDisconnected):
                continue
            side.open.remove((event.peer, event.lease, event.part))  # exactly one end for each
            if isinstance(side.mover, KvReceiver):
                assert type(event) is side.outcome.pop(event.lease, PartFailed)
                num_bytes = len(self.grants[event.lease].blocks) * HALF * self.grants[event.lease].kv_slice.num_layers
                assert not isinstance(event, PartLanded) or event.num_bytes == num_bytes

    def disconnect(self) -> None:
        one, other = self.rng.sample(self.pair(), 2)
        one.transport.disconnect(other.name)

    def kill(self) -> None:
        sides = self.rng.choice([self.senders, self.receivers])
        dead = sides.pop(self.rng.randrange(len(sides)))
        self.hub.kill(dead.name)
        self.unsent = [lease for lease in self.unsent if dead not in self.grants[lease]]
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
            self.hear(side)
            assert not side.open
            assert side.mover.num_free_slots == NUM_SLOTS


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 40))])
def test_whatever_happens_only_what_was_sent_lands(seed: int) -> None:
    world = World(seed)
    usual = [world.grant, world.send, world.deliver, world.poll, world.poll]
    for step in range(STEPS):
        rare = [world.disconnect, world.kill, world.damage_header] if step % 12 == 0 else []
        rare += [world.damage, world.withdraw] if step % 4 == 0 else []
        world.rng.choice(usual + rare)()
        world.check()
    assert world.counts[PartLanded.__name__] > 3
    assert world.counts[PartFailed.__name__] > 0
    world.close()
