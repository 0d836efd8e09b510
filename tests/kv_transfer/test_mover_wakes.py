"""When a receiver has its engine woken: only if a request could go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.receiver import PartLanded, PartUnused
from kv_transfer.transport import PeerDisconnected
from tests.kv_transfer.mover_sides import NUM_SLOTS, Side, linked


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
