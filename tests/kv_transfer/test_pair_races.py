"""Two ends of a transport that connect, transfer, disconnect and connect again in any order: what arrives is what was
sent, every slot comes back once, and nothing is left when both are closed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kv_transfer import create
from kv_transfer.pair import PairTransport
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, PeerLost
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rig_node import DEADLINE_S

SLOT_BYTES = 1 << 16
STEPS = 2500


class Side:
    """`lent`: the value that a slot in flight is, or should become, full of."""

    def __init__(self, kind: str, name: str, counts: Counter[str]) -> None:
        self.name = name
        self.staging = Staging(4, SLOT_BYTES, "cpu")
        self.lent: dict[int, int] = {}
        self.counts = counts
        if kind == "nixl":
            self.transport = create("nixl", self.staging, lambda: None)
        else:
            self.transport = PairTransport(self.staging, lambda: None, ordered_carrier())

    def lend(self, fill: int, value: int) -> int | None:
        slot = self.staging.take()
        if slot is not None:
            self.staging.memory(slot).fill_(fill)
            self.staging.lend(slot)
            self.lent[slot] = value
        return slot

    def poll(self) -> None:
        for event in self.transport.poll():
            self.counts[type(event).__name__] += 1
            if isinstance(event, PeerLost):
                continue
            value = self.lent.pop(event.slot)  # exactly one end for each
            if isinstance(event, Arrived):
                assert bool((self.staging.memory(event.slot) == value).all())
            self.staging.reclaim(event.slot)
            self.staging.give_back(event.slot)
        self.staging.check_integrity()


@pytest.mark.parametrize("kind", ["nixl", pytest.param("ordered", marks=pytest.mark.full)])
def test_whatever_order_things_happen_in_what_arrives_was_sent(kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    rng, counts = random.Random(7), Counter[str]()
    sides = [Side(kind, name, counts) for name in ("one", "other")]
    for tag in range(STEPS):
        me, peer = rng.sample(sides, 2)
        match rng.choices(["disconnect", "connect", "transfer", "wait"], [1, 4, 10, 10])[0]:
            case "disconnect":
                me.transport.disconnect(peer.name)
            case "connect":
                me.transport.connect(peer.name, peer.transport.info(), DEADLINE_S)
                peer.transport.connect(me.name, me.transport.info(), DEADLINE_S)
            case "transfer":
                value = tag % 200 + 1
                if (slot := peer.lend(0, value)) is not None:
                    peer.transport.expect(me.name, tag, slot, SLOT_BYTES)
                if (slot := me.lend(value, value)) is not None:
                    me.transport.push(peer.name, tag, slot, SLOT_BYTES)
        for side in sides:
            side.poll()
    for side in sides:
        side.transport.close()
    for side in sides:
        side.poll()
        assert not side.lent
        assert side.staging.num_free == side.staging.num_slots
    assert counts["Arrived"] > 20
    assert counts["Failed"] > 0
