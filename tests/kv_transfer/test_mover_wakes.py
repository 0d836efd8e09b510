"""When a receiver has its engine woken: only if a request could go on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest

from kv_transfer.copies import NoCopies
from kv_transfer.receiver import PartLanded, PartUnused
from kv_transfer.transport import PeerDisconnected
from tests.kv_transfer.mover_sides import NUM_SLOTS, PART_BLOCKS, Side, linked


def wakes_with(sender: Side, receiver: Side, lease: int, part: int) -> bool:
    """Send the part, and have it land; whether that wakes the receiver's engine."""
    receiver.woken.clear()
    assert sender.mover.send(receiver.name, lease, part, [part])
    sender.transport.hub.deliver_all()
    sender.mover.poll()
    return receiver.woken.is_set()


def test_the_engine_is_woken_for_a_part_only_if_it_could_go_on(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    wakes = partial(wakes_with, *hub_pair)

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


def test_the_engine_is_woken_for_a_credit_that_is_not_used(hub_pair: tuple[Side, Side]) -> None:
    sender, receiver = hub_pair
    for part in (0, 1):
        assert receiver.mover.expect(sender.name, 1, part, [part], is_last=part == 1)
    assert not receiver.woken.is_set()
    assert sender.mover.drain(receiver.name, 1, 0)
    sender.transport.hub.deliver_all()
    assert receiver.woken.is_set()
    assert receiver.mover.poll() == [PartUnused(sender.name, 1, 0)]


def test_the_engine_is_woken_for_a_failure_and_told_of_it_by_each_poll(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    assert receiver.mover.expect(sender.name, 1, 0, [0])
    assert receiver.mover.expect(sender.name, 1, 1, [1], is_last=True)
    monkeypatch.setattr(receiver.mover, "_land", Mock(side_effect=RuntimeError("no device")))
    assert sender.mover.send(receiver.name, 1, 0, [0])
    sender.transport.hub.deliver_all()
    assert receiver.woken.is_set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no device"):
            receiver.mover.poll()


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


def test_a_part_of_a_long_transfer_wakes_the_engine_once(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if there is a slot for a further part; else when the part's own copy is done."""
    sender, receiver = hub_pair
    copied = list[Callable[[], None]]()
    monkeypatch.setattr(receiver.mover._copies, "when_done", lambda slot, after: copied.append(after))

    def lands(part: int) -> None:
        receiver.woken.clear()
        assert sender.mover.send(receiver.name, 1, part, [part])
        sender.transport.hub.deliver_all()

    for part in range(NUM_SLOTS - 1):
        assert receiver.mover.expect(sender.name, 1, part, [part])
    lands(0)
    assert receiver.woken.is_set()
    assert not copied
    receiver.mover.poll()
    for part in range(NUM_SLOTS - 1, NUM_SLOTS + 1):
        assert receiver.mover.expect(sender.name, 1, part, [part])
    lands(1)
    assert not receiver.woken.is_set()
    [after] = copied
    after()
    assert receiver.woken.is_set()


def test_an_engine_that_polls_soon_is_woken_for_what_is_complete_only(
    hub_pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = hub_pair
    wakes, relaxed = partial(wakes_with, *hub_pair), list[bool]()
    monkeypatch.setattr(receiver.transport, "relax", relaxed.append)
    for part in range(2):
        assert receiver.mover.expect(sender.name, 1, part, [part])
    assert receiver.mover.expect(sender.name, 2, 0, [3], is_last=True)
    for _ in range(2):
        receiver.mover.polls_soon(True)
    assert not wakes(1, 0), "it will see that more parts may be expected"
    assert wakes(2, 0), "all of it is here"
    assert [event.lease for event in receiver.mover.poll()] == [1, 2]
    assert receiver.mover.expect(sender.name, 1, 2, [2])
    assert not wakes(1, 1)
    receiver.mover.polls_soon(False)
    assert receiver.woken.is_set(), "nothing else would"
    receiver.mover.poll()
    receiver.mover.polls_soon(True)
    assert wakes(1, 2), "nothing more can come until it expects more"
    assert relaxed == [True, False, True]


class LateCopies(NoCopies):
    """Copies out of slots that end when the test has them end, one after another, as on a GPU."""

    def __init__(self) -> None:
        super().__init__(PART_BLOCKS)
        self.running: list[int] = []
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def scatter(self, slot: int, *_: object) -> Callable[[], None]:
        return partial(self.running.append, slot)

    def is_done(self, slot: int) -> bool:
        return slot not in self.running

    def when_done(self, slot: int, after: Callable[[], None]) -> None:
        self._waiting.append((slot, after))
        self._tell()

    def end_one(self) -> None:
        self.running.pop(0)
        self._tell()

    def _tell(self) -> None:
        over = [wait for wait in self._waiting if self.is_done(wait[0])]
        self._waiting = [wait for wait in self._waiting if not self.is_done(wait[0])]
        for _, after in over:
            after()


class Leases:
    """A decode node's: an engine that only runs when it is woken, and shares slots as `Reservations` does."""

    def __init__(self, sender: Side, receiver: Side, num_leases: int, num_parts: int) -> None:
        self.sender, self.receiver, self.num_parts = sender, receiver, num_parts
        self.steps_run = False
        self.posted, self.sent, self.landed = ([0] * num_leases for _ in range(3))
        self._num_freed = -1

    def turn(self) -> None:
        self.receiver.woken.clear()
        mover = self.receiver.mover
        events = mover.poll()
        for event in events:
            self.landed[event.lease] += 1
        num_freed = mover.num_freed_slots
        if not events and num_freed == self._num_freed:
            return
        for lease in range(len(self.posted)):
            while self.posted[lease] < self.num_parts and self._open(lease) < max(2, mover.num_free_slots):
                part = self.posted[lease]
                if not mover.expect(self.sender.name, lease, part, [1], is_last=part + 1 == self.num_parts):
                    break
                self.posted[lease] += 1
        self._num_freed = num_freed

    def send_one(self, rng: random.Random) -> bool:
        """Send a part that the receiver expects. False: there is none, or no slot for it."""
        self.sender.mover.poll()
        ready = [lease for lease, sent in enumerate(self.sent) if sent < self.posted[lease]]
        if not ready:
            return False
        lease = rng.choice(ready)
        done: bool = self.sender.mover.send(self.receiver.name, lease, self.sent[lease], [1])
        self.sent[lease] += done
        return done

    def _open(self, lease: int) -> int:
        return self.posted[lease] - self.landed[lease]


@pytest.mark.parametrize("seed", range(60))
def test_no_lease_waits_for_an_engine_that_nobody_wakes(hub_pair: tuple[Side, Side], seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver = hub_pair
    copies = receiver.mover._copies = LateCopies()
    leases = Leases(sender, receiver, rng.randint(1, 3), rng.randint(1, 7))
    hub = sender.transport.hub

    def deliver() -> bool:
        if not hub.pending:
            return False
        hub.deliver(rng.randrange(len(hub.pending)))
        return True

    def end_copy() -> bool:
        if not copies.running:
            return False
        copies.end_one()
        return True

    def turn() -> bool:
        if not receiver.woken.is_set():
            return False
        leases.turn()
        return True

    def step() -> bool:
        """A step begins, or one ends, which is a turn for the engine."""
        if rng.random() < 0.8:
            return False
        if leases.steps_run:
            leases.turn()
        leases.steps_run = not leases.steps_run
        receiver.mover.polls_soon(leases.steps_run)
        return True

    leases.turn()
    actions: list[Callable[[], bool]] = [partial(leases.send_one, rng), deliver, end_copy, turn, step]
    while any(action() for action in rng.sample(actions, len(actions))) or leases.steps_run:
        pass
    assert leases.landed == [leases.num_parts] * len(leases.landed)


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
