"""The memory transport is as unforgiving as a network: what tests rely on when they decide what is delivered."""

from __future__ import annotations

import pytest

from kv_transfer import create
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Failed, PeerDisconnected, Sent
from kv_transfer.transports.memory import MemoryHub, MemoryTransport

SLOT_BYTES = 16


class End:
    def __init__(self, hub: MemoryHub, name: str) -> None:
        self.staging = Staging(4, SLOT_BYTES, "cpu")
        self.num_wakes = 0
        self.transport = MemoryTransport(hub, name, self.staging, self._wake)

    def _wake(self) -> None:
        self.num_wakes += 1

    def slot(self, value: int) -> int:
        slot = self.staging.take()
        assert slot is not None
        self.staging.memory(slot).fill_(value)
        self.staging.lend(slot)
        return slot

    def values(self, slot: int) -> set[int]:
        return set(self.staging.memory(slot).tolist())


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def ends(hub: MemoryHub) -> tuple[End, End]:
    one, other = End(hub, "one"), End(hub, "other")
    one.transport.connect("other", other.transport.info())
    other.transport.connect("one", one.transport.info())
    return one, other


def test_bytes_are_read_when_they_are_delivered(hub: MemoryHub, ends: tuple[End, End]) -> None:
    one, other = ends
    source, target = one.slot(1), other.slot(0)
    one.transport.push("other", 5, source, SLOT_BYTES, b"head")
    assert not hub.pending
    other.transport.expect("one", 5, target, SLOT_BYTES)
    assert one.transport.poll() == other.transport.poll() == []
    one.staging.memory(source).fill_(2)
    hub.deliver()
    assert other.values(target) == {2}
    assert one.transport.poll() == [Sent("other", 5, source)]
    assert other.transport.poll() == [Arrived("one", 5, target, b"head")]
    assert (one.num_wakes, other.num_wakes) == (1, 1)


def test_delivery_is_in_the_order_that_the_test_chooses(hub: MemoryHub, ends: tuple[End, End]) -> None:
    one, other = ends
    slots = [other.slot(0) for _ in range(3)]
    for tag in range(3):
        other.transport.expect("one", tag, slots[tag], SLOT_BYTES)
        one.transport.push("other", tag, one.slot(tag), SLOT_BYTES, b"%d" % tag)
    hub.deliver(1)
    hub.deliver_all()
    arrived = [e for e in other.transport.poll() if isinstance(e, Arrived)]
    assert [(e.tag, e.header) for e in arrived] == [(1, b"1"), (0, b"0"), (2, b"2")]


def test_late_bytes_come_after_a_cut(hub: MemoryHub, ends: tuple[End, End]) -> None:
    one, other = ends
    target = other.slot(7)
    late = other.staging.memory(target)
    other.transport.expect("one", 5, target, SLOT_BYTES)
    one.transport.push("other", 5, one.slot(1), SLOT_BYTES, b"")
    other.transport.disconnect("one")
    assert not hub.pending
    assert set(late.tolist()) == {0xEE}
    assert other.staging.memory(target) is not late
    assert other.transport.poll() == [Failed("one", 5, target, "disconnected")]
    assert [type(e) for e in one.transport.poll()] == [Failed, PeerDisconnected]


def test_a_killed_transport_ends_everybodys_operations_with_it(hub: MemoryHub, ends: tuple[End, End]) -> None:
    one, _ = ends
    source, target = one.slot(1), one.slot(0)
    one.transport.push("other", 1, source, SLOT_BYTES, b"")
    one.transport.expect("other", 2, target, SLOT_BYTES)
    hub.kill("other")
    *failed, lost = one.transport.poll()
    assert {e.slot for e in failed if isinstance(e, Failed)} == {source, target}
    assert lost == PeerDisconnected("other", "the peer died")


def test_an_end_that_was_not_heard_of_is_not_the_next_connections(hub: MemoryHub, ends: tuple[End, End]) -> None:
    one, other = ends
    other.transport.disconnect("one")
    one.transport.connect("other", other.transport.info())
    assert one.transport.poll() == []


def test_create_knows_its_transports() -> None:
    staging = Staging(1, SLOT_BYTES, "cpu")
    create("memory", staging, lambda: None).close()
    with pytest.raises(ValueError, match="pigeon"):
        create("pigeon", staging, lambda: None)
