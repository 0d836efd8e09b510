"""Two ends of a transport that connect, transfer, disconnect and connect again in any order: what arrives is what was
sent, every slot comes back once, and nothing is left when both are closed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kv_transfer import create, staging_for
from kv_transfer.async_operation import RemoteSlot
from kv_transfer.transport import Arrived, PeerDisconnected
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rig_node import DEADLINE_S, header_of

SLOT_BYTES = 1 << 16
STEPS = 2500


class Side:
    """`lent`: the value that a slot in flight is, or should become, full of. `unfinished`: what is yet to be stored at
    the peer, and pushed."""

    def __init__(self, kind: str, name: str, counts: Counter[str]) -> None:
        self.name = name
        self.staging = staging_for(kind, 4, SLOT_BYTES, "cpu")
        self.lent: dict[int, int] = {}
        self.unfinished: list[tuple[str, int, int, RemoteSlot]] = []
        self.counts = counts
        self.transport: Any
        if kind == "ordered":
            self.transport = PairTransport(self.staging, lambda: None, ordered_carrier())
        else:
            self.transport = create(kind, self.staging, lambda: None)

    def lend(self, fill: int, value: int) -> int | None:
        slot = self.staging.take()
        if slot is not None:
            self.staging.memory(slot).fill_(fill)
            self.staging.lend(slot)
            self.lent[slot] = value
        return slot

    def begin(self, peer: str, tag: int, value: int) -> None:
        """What cannot be stored at the peer is pushed at once."""
        slot = self.lend(0, value)
        if slot is None:
            return
        if (placed := self.transport.acquire_remote_slot(peer, tag, SLOT_BYTES)) is not None:
            self.counts["placed"] += 1
            self.unfinished.append((peer, tag, slot, placed))
            if tag % 3:
                placed.announce(header_of(tag))
            return
        self.staging.memory(slot).fill_(value)
        self.transport.push(peer, tag, slot, SLOT_BYTES, header_of(tag))

    def finish(self) -> None:
        """The oldest that is unfinished."""
        if self.unfinished:
            peer, tag, slot, placed = self.unfinished.pop(0)
            placed.memory.fill_(self.lent[slot])
            if tag % 2:
                placed.signal(None)
            self.transport.push(peer, tag, slot, SLOT_BYTES, header_of(tag))

    def poll(self) -> None:
        for event in self.transport.poll():
            self.counts[type(event).__name__] += 1
            if isinstance(event, PeerDisconnected):
                continue
            value = self.lent.pop(event.slot)  # exactly one end for each
            if isinstance(event, Arrived):
                assert event.header == header_of(event.tag)
                assert bool((self.staging.memory(event.slot) == value).all())
            self.staging.reclaim(event.slot)
            self.staging.give_back(event.slot)
        self.staging.check_integrity()


@pytest.mark.parametrize("kind", ["ipc", "nixl", pytest.param("ordered", marks=pytest.mark.full)])
def test_whatever_order_things_happen_in_what_arrives_was_sent(kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    rng, counts = random.Random(7), Counter[str]()
    sides = [Side(kind, name, counts) for name in ("one", "other")]
    for tag in range(STEPS):
        me, peer = rng.sample(sides, 2)
        match rng.choices(["disconnect", "connect", "transfer", "finish"], [1, 4, 10, 10])[0]:
            case "disconnect":
                me.transport.disconnect(peer.name)
            case "connect":
                me.transport.connect(peer.name, peer.transport.info(), DEADLINE_S)
                peer.transport.connect(me.name, me.transport.info(), DEADLINE_S)
            case "transfer":
                value = tag % 200 + 1
                if (slot := peer.lend(0, value)) is not None:
                    peer.transport.expect(me.name, tag, slot, SLOT_BYTES)
                me.begin(peer.name, tag, value)
            case "finish":
                me.finish()
        for side in sides:
            side.poll()
    for side in sides:
        side.finish()
        side.transport.close()
    for side in sides:
        while side.unfinished:
            side.finish()
        side.poll()
        assert not side.lent
        assert side.staging.num_free == side.staging.num_slots
    assert counts["Arrived"] > 20
    assert counts["Failed"] > 0
    assert (counts["placed"] > 20) == (kind == "ipc")
