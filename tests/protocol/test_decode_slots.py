"""Who of several leases gets a slot that becomes free, on a decode node of one rank or two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.handoff_messages import Credit, Grant, Reserve
from baton.messages import Abort, AttemptId
from baton.node_info import NodeRole
from kv_transfer.parts import slot_bytes_for
from kv_transfer.ranks import rank_name
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryTransport
from node.events import FromPeer, PeerOpened, SessionOpened, ToPrefill
from tests.protocol.network import EPOCH
from tests.protocol.node import PART_BLOCKS, Node
from tests.protocol.test_simulation import BY_LAYERS
from tests.protocol.world import World

PEER = "p"
NUM_TOKENS = 22  # three parts for each rank


class Leasing:
    """A decode node with leases; its prefill node, of one rank, is the test. `credits`: of each lease, by serial."""

    def __init__(self, num_slots: int, num_ranks: int = 1) -> None:
        ranks = {NodeRole.DECODE: BY_LAYERS} if num_ranks == 2 else {}
        self.world = World(num_prefill=0, num_decode=1, num_blocks=60, num_slots=num_slots, ranks=ranks)
        self.node: Node
        (self.node,) = self.world.nodes.values()
        self.credits: dict[int, int] = {}
        layout = World(num_prefill=0, num_decode=1).nodes.popitem()[1].model.layout  # one that is not divided
        staging = Staging(16, slot_bytes_for(PART_BLOCKS, layout.block_bytes), "cpu")
        transport = MemoryTransport(self.world.hub, rank_name(PEER, 0), staging, lambda: None)
        pool = torch.zeros(4, layout.block_bytes, dtype=torch.uint8)
        self._sender = KvSender(transport, staging, pool, layout)
        self.node.connect(PEER, [transport.info()])
        for rank, there in enumerate(self.node.transports):
            transport.connect(rank_name(self.node.incarnation, rank), there.info())
        self.node.hear(SessionOpened(EPOCH))
        self.node.hear(PeerOpened(PEER, PART_BLOCKS, layout))

    def turn(self) -> None:
        core, now = self.node.core, self.world.now
        core.prepare(now)
        core.compute(now)
        self.node.check_integrity()
        for output in core.take_outputs():
            match output:
                case ToPrefill(_, Grant() | Credit() as message):
                    self.credits[message.lease] = message.credits

    def reserve(self, name: str) -> None:
        """Without a turn."""
        work = AttemptId(EPOCH, name, 0)
        self.node.hear(FromPeer(PEER, Reserve(work, self.node.incarnation, NUM_TOKENS, (), 1, 60.0, 40)))

    def end(self, name: str) -> None:
        self.node.hear(Abort(AttemptId(EPOCH, name, 0)))
        self.turn()

    def drain(self, lease: int, *parts: int) -> None:
        """Use up these credits of a dead lease. Without a turn."""
        for part in parts:
            rank = part % len(self.node.transports)
            assert self._sender.drain(rank_name(self.node.incarnation, rank), lease, part)
        self.world.hub.deliver_all()
        self._sender.poll()


def test_a_slot_that_is_freed_while_slots_are_shared_out_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the transport's thread, or by the end of a copy: just after the last lease has found none."""
    leasing = Leasing(num_slots=3)
    for name in ("ended", "first", "last"):
        leasing.reserve(name)
        leasing.turn()
    assert leasing.credits == {1: 2, 2: 1, 3: 0}
    leasing.end("ended")
    movers, expect = leasing.node.movers, leasing.node.movers.expect

    def expect_and_free(*part: Any) -> bool:
        found: bool = expect(*part)
        if not found:
            monkeypatch.undo()
            leasing.drain(1, 1)
        return found

    monkeypatch.setattr(movers, "expect", expect_and_free)
    leasing.drain(1, 0)
    leasing.turn()
    assert leasing.credits == {1: 2, 2: 2, 3: 0}
    leasing.turn()
    assert leasing.credits[3] == 1


def test_a_slot_of_one_rank_is_shared_out_although_one_of_another_was_taken() -> None:
    """As many slots are free as before, but not of the same rank."""
    leasing = Leasing(num_slots=4, num_ranks=2)
    for name in ("ended", "a", "b", "short"):
        leasing.reserve(name)
        leasing.turn()
    assert leasing.credits == {1: 4, 2: 2, 3: 2, 4: 0}
    leasing.end("ended")
    leasing.drain(1, 1, 3)  # of the second rank
    leasing.turn()
    assert [staging.num_free for staging in leasing.node.stagings] == [0, 2]
    assert not leasing.credits[4], "a part for the first rank comes first"
    leasing.drain(1, 0, 2)
    leasing.reserve("new")
    leasing.turn()
    assert leasing.credits == {1: 4, 2: 2, 3: 2, 4: 2, 5: 2}


def watch_receives(leasing: Leasing, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What each rank's transport is told about receives, none of which it posts, from now on."""
    seen = list[tuple[int, str]]()
    for rank, mover in enumerate(leasing.node.movers.ranks):

        @contextlib.contextmanager
        def batched(rank: int = rank) -> Iterator[None]:
            seen.append((rank, "begins"))
            yield
            seen.append((rank, "ends"))

        def expect(*_: object, rank: int = rank) -> None:
            seen.append((rank, "receive"))

        monkeypatch.setattr(mover.transport, "batched", batched)
        monkeypatch.setattr(mover.transport, "expect", expect)
    return seen


def test_receives_for_a_lease_are_posted_to_each_rank_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    leasing = Leasing(num_slots=4, num_ranks=2)
    seen = watch_receives(leasing, monkeypatch)
    leasing.reserve("a")
    leasing.turn()
    for rank in range(2):
        own = [what for number, what in seen if number == rank]
        assert own == ["begins", *["receive"] * (leasing.credits[1] // 2), "ends"]
    assert leasing.credits[1] > 2


def test_receives_for_all_leases_that_were_short_of_slots_are_posted_in_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leasing = Leasing(num_slots=6)
    for name in ("ended", "a", "b", "c"):
        leasing.reserve(name)
        leasing.turn()
    assert leasing.credits == {1: 3, 2: 2, 3: 1, 4: 0}
    leasing.end("ended")
    leasing.drain(1, 0, 1, 2)
    seen = watch_receives(leasing, monkeypatch)
    leasing.turn()
    assert leasing.credits == {1: 3, 2: 3, 3: 2, 4: 1}
    assert [what for _, what in seen] == ["begins", *["receive"] * 3, "ends"]
