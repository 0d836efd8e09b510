"""Senders and receivers over the memory transport, raced: whatever is delivered, delayed, cut or killed, what lands is
what was sent, and every part and every slot is accounted for."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from baton.errors import TransferError
from baton.layout import KvSlice
from baton_kernels.block_copy import Move
from kv_transfer.async_operation import AsyncOperation, Target
from kv_transfer.parts import PartHeader, slot_bytes_for, split_tag
from kv_transfer.receiver import KvReceiver, PartLanded, PartRefused, PartUnused
from kv_transfer.sender import KvSender, PartFailed
from kv_transfer.staging import Staging
from kv_transfer.transport import PeerDisconnected
from kv_transfer.transports.memory import MemoryHub, MemoryTransport, Transfer
from tests.kv_transfer.rig_node import BLOCK_BYTES, DEADLINE_S, LAYOUT

NUM_BLOCKS, PART_BLOCKS, NUM_SLOTS = 6, 2, 3
HALF = BLOCK_BYTES // 2
SLICES = (LAYOUT.whole, KvSlice(0, 1, 0, 2), KvSlice(1, 2, 0, 2))
"""Of each block: what a part carries, all or one of the two layers, which are its halves."""
STEPS = 600


class Side:
    """A process with a mover. `halves` is what both halves of each block of a receiver's pool should be full of.
    `woken`: its engine was."""

    def __init__(self, hub: MemoryHub, name: str, is_sender: bool) -> None:
        self.name = name
        self.staging = Staging(NUM_SLOTS, slot_bytes_for(PART_BLOCKS, BLOCK_BYTES), "cpu")
        self.woken = threading.Event()
        self.transport = MemoryTransport(hub, name, self.staging, self.woken.set)
        self.pool = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        kind = KvSender if is_sender else KvReceiver
        self.mover = kind(self.transport, self.staging, self.pool, LAYOUT)
        self.halves = [[0, 0] for _ in range(NUM_BLOCKS)]
        self.open: set[tuple[str, int, int]] = set()  # parts without an end
        self.outcome: dict[int, type] = {}  # lease -> the event that is due, of what has come


class Grant(NamedTuple):
    """Where a part of a lease is to go: over this slice of these blocks."""

    receiver: Side
    sender: Side
    lease: int
    blocks: list[int]
    what: KvSlice


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
        what = self.rng.choice(SLICES)
        if receiver.mover.expect(sender.name, lease, 0, blocks, what):
            receiver.open.add((sender.name, lease, 0))
            self.grants[lease] = Grant(receiver, sender, lease, blocks, what)
            self.unsent.append(lease)

    def send(self) -> None:
        """What was granted, or nothing, or something else."""
        if not self.unsent:
            return
        receiver, sender, lease, blocks, what = self.grants[self.rng.choice(self.unsent)]
        way = self.rng.choice(["granted", "granted", "granted", "nothing", "other blocks", "other slice"])
        if way == "other slice":
            what = self.rng.choice([other for other in SLICES if other != what])
        num_blocks = len(blocks) if way != "other blocks" else PART_BLOCKS + 1 - len(blocks)
        source = self.rng.sample(range(NUM_BLOCKS), num_blocks)
        values = [self.rng.randint(1, 200) for _ in source]
        for block, value in zip(source, values, strict=True):
            sender.pool[block] = value
        checked = self.rng.random() < 0.5
        if way == "nothing":
            sent = sender.mover.drain(receiver.name, lease, 0)
        else:
            sent = sender.mover.send(receiver.name, lease, 0, source, what, checked)
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
        lease, _ = split_tag(transfer.push.tag)
        receiver, _, _, blocks, what = self.grants[lease]
        if transfer.push.header != self.headers.get(lease, transfer.push.header):
            receiver.outcome[lease] = PartRefused
            return
        header = PartHeader.parse(transfer.push.header)
        if header.drain or lease in self.withdrawn:
            receiver.outcome[lease] = PartUnused
        elif (header.num_blocks, header.what) != (len(blocks), what):
            receiver.outcome[lease] = PartRefused
        elif self.flipped[lease]:
            receiver.outcome[lease] = PartRefused
            self.counts["damaged"] += 1
        else:
            receiver.outcome[lease] = PartLanded
            for block, value in zip(blocks, self.content[lease], strict=True):
                for half in range(what.layer_start, what.layer_end):
                    receiver.halves[block][half] = value

    def damage_header(self) -> None:
        """A bit of a header falls over on the way."""
        if self.hub.pending:
            push = self.rng.choice(self.hub.pending).push
            self.headers.setdefault(split_tag(push.tag)[0], push.header)
            header = bytearray(push.header)
            header[self.rng.randrange(len(header))] ^= 1 << self.rng.randrange(8)
            push.header = bytes(header)

    def damage(self) -> None:
        """A bit of a checked part falls over on the way."""
        sound = [t.push for t in self.hub.pending if split_tag(t.push.tag)[0] not in self.headers]
        if checked := [push for push in sound if PartHeader.parse(push.header).checked]:
            push = self.rng.choice(checked)
            place = self.rng.randrange(PartHeader.parse(push.header).message_bytes), self.rng.randrange(8)
            push.owner.staging.memory(push.slot)[place[0]] ^= 1 << place[1]
            self.flipped[split_tag(push.tag)[0]] ^= {place}

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
                num_bytes = len(self.grants[event.lease].blocks) * HALF * self.grants[event.lease].what.num_layers
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


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20, 40))])
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


def test_who_asks_for_checksums_takes_no_part_without(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    receiver.mover.verify = True
    sender.pool[3, HALF:] = 7  # not what the first half has
    for lease, checked in ((1, False), (2, True)):
        assert receiver.mover.expect(sender.name, lease, 0, [2], SLICES[2])
        assert sender.mover.send(receiver.name, lease, 0, [3], SLICES[2], checked)
    sender.transport.hub.deliver_all()
    plain, checked_part = receiver.mover.poll()
    assert isinstance(plain, PartRefused)
    assert "no checksums" in plain.error.message
    assert checked_part == PartLanded(sender.name, 2, 0, HALF)
    assert receiver.mover.num_damaged_pieces == 0
    assert receiver.mover.num_free_slots == NUM_SLOTS


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


def test_the_engine_is_woken_for_a_part_only_if_it_could_go_on(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair

    def wakes(lease: int, part: int) -> bool:
        receiver.woken.clear()
        assert sender.mover.send(receiver.name, lease, part, [part])
        sender.transport.hub.deliver_all()
        sender.mover.poll()
        return receiver.woken.is_set()

    def expect(lease: int, part: int, is_last: bool = False) -> bool:
        return bool(receiver.mover.expect(sender.name, lease, part, [part], is_last=is_last))

    assert expect(1, 0)
    assert wakes(1, 0), "more parts may be expected"
    assert [event.part for event in receiver.mover.poll()] == [0]
    assert expect(1, 1)
    assert expect(1, 2)
    assert expect(1, 3, is_last=True)
    assert not wakes(1, 2), "others are missing"
    assert not wakes(1, 1), "one is missing"
    assert wakes(1, 3), "all are here"
    assert expect(2, 0, is_last=True)
    assert not wakes(2, 0), "it has been woken"
    assert [event.part for event in receiver.mover.poll()] == [2, 1, 3, 0]


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


def test_the_engine_is_woken_for_a_credit_that_is_not_used(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    for part in (0, 1):
        assert receiver.mover.expect(sender.name, 1, part, [part], is_last=part == 1)
    assert not receiver.woken.is_set()
    assert sender.mover.drain(receiver.name, 1, 0)
    sender.transport.hub.deliver_all()
    assert receiver.woken.is_set()
    assert receiver.mover.poll() == [PartUnused(sender.name, 1, 0)]


def test_the_engine_is_woken_for_a_slot_only_if_a_lease_waits_for_one(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    for part in range(NUM_SLOTS):
        assert receiver.mover.expect(sender.name, 1, part, [part], is_last=part == NUM_SLOTS - 1)
    assert not receiver.mover.expect(sender.name, 2, 0, [5], is_last=True)
    for part, is_waited_for in ((0, True), (1, False)):
        receiver.woken.clear()
        assert sender.mover.send(receiver.name, 1, part, [part])
        sender.transport.hub.deliver_all()
        assert receiver.woken.is_set() is is_waited_for
        receiver.mover.withdraw(2)  # it waits no more


@pytest.mark.parametrize("has_landed", [False, True])
def test_the_engine_is_woken_for_a_peer_that_is_lost_while_parts_of_another_land(
    hub_pair: tuple[Side, Side], has_landed: bool
) -> None:
    sender, receiver = hub_pair
    hub = sender.transport.hub
    other, _ = linked(Side(hub, "other", True), receiver)
    for part in (0, 1):
        assert receiver.mover.expect(sender.name, 1, part, [part], is_last=part == 1)
    if has_landed:
        assert sender.mover.send(receiver.name, 1, 0, [0])
        hub.deliver_all()
        assert not receiver.woken.is_set(), "a part is missing"
    hub.kill(other.name)
    assert receiver.woken.is_set()
    assert [type(event) for event in receiver.mover.poll()] == [PartLanded] * has_landed + [PeerDisconnected]


class Device:
    """Copies that are under way, to slots at a peer, and a transport; `said` is what happened, in order."""

    def __init__(self, sender: KvSender, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.error = ""
        memory = torch.zeros(sender.part_blocks * BLOCK_BYTES, dtype=torch.uint8)
        self._target = Target(memory, announce=lambda header: self.said.append(f"say {PartHeader.parse(header).part}"))
        monkeypatch.setattr(sender._copies, "gather", self._gather)
        monkeypatch.setattr(sender.transport, "acquire_remote_slot", lambda *_: self._target)
        monkeypatch.setattr(sender.transport, "push", lambda _, tag, *__: self.said.append(f"push {split_tag(tag)[1]}"))

    def _gather(self, slot: int, blocks: list[int], *_: Any) -> AsyncOperation:
        self.said.append(f"copy {blocks[0]}")
        return self

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
        sender.mover.send(receiver.name, 1, 0, list(range(5)), SLICES[1])
    assert sender.mover.num_free_slots == NUM_SLOTS


@pytest.fixture
def hub_pair() -> tuple[Side, Side]:
    hub = MemoryHub()
    return linked(Side(hub, "sender", True), Side(hub, "receiver", False))


def linked(sender: Side, receiver: Side) -> tuple[Side, Side]:
    sender.transport.connect(receiver.name, receiver.transport.info())
    receiver.transport.connect(sender.name, sender.transport.info())
    return sender, receiver
