"""Rules of the decode node that a race shows only now and then, each by itself."""

from __future__ import annotations

import pytest
import torch

from baton.errors import InvalidRequest, PeerLost, RequestCancelled
from baton.messages import Abort, Commit, End, Grant, Refuse, Release, Reserve, Sample, WorkId
from baton.sampling import SamplingParams
from engine.node.events import FromPeer, FromRouter, PeerClosed, PeerOpened, SessionOpened, ToPrefill, ToRouter
from kv_transfer.memory import MemoryTransport
from kv_transfer.parts import slot_bytes_for
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from tests.protocol.network import EPOCH
from tests.protocol.node import PART_BLOCKS, Node
from tests.protocol.world import World

WORK = WorkId(EPOCH, "r", 1)
PEER = "p"


@pytest.fixture
def node() -> Node:
    (node,) = World(num_prefill=0, num_decode=1).nodes.values()
    return node


@pytest.fixture(autouse=True)
def sender(node: Node) -> KvSender:
    """Its peer's, whose blocks are full of sevens. It is connected, so that posted receives wait and do not fail by
    themselves."""
    layout, hub = node.model.layout, node.transport.hub
    staging = Staging(2, slot_bytes_for(PART_BLOCKS, layout.block_bytes), "cpu")
    transport = MemoryTransport(hub, PEER, staging, lambda: None)
    sender = KvSender(transport, staging, torch.full((4, layout.block_bytes), 7, dtype=torch.uint8), layout)
    node.transport.connect(PEER, transport.info())
    transport.connect(node.incarnation, node.transport.info())
    node.core.handle(SessionOpened(EPOCH), 0.0)
    node.core.handle(PeerOpened(PEER, PART_BLOCKS), 0.0)
    return sender


def reserve(node: Node, work: WorkId = WORK) -> list[object]:
    """What the prefill node is answered."""
    message = Reserve(work, node.incarnation, 10, (), 1, 60.0, 20)
    node.core.handle(FromPeer(PEER, message), 1.0)
    return answers(node)


def answers(node: Node) -> list[object]:
    node.core.prepare(2.0)
    node.core.compute(2.0)
    said = [o for o in node.core.take_outputs() if isinstance(o, ToPrefill | ToRouter)]
    return [o.message if isinstance(o, ToPrefill) else o.update.kind for o in said]


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_of_layers_that_the_model_has_not_are_refused(node: Node, groups: int) -> None:
    message = Reserve(WORK, node.incarnation, 10, (), 1, 60.0, 20, layer_groups=groups)
    node.core.handle(FromPeer(PEER, message), 1.0)
    (refused,) = answers(node)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, InvalidRequest)


@pytest.mark.parametrize("aborted", [1, 2])
def test_an_abort_wins_against_a_reserve_that_it_overtook(node: Node, aborted: int) -> None:
    node.core.handle(FromRouter(EPOCH, Abort(WorkId(EPOCH, "r", aborted))), 0.5)
    (refused,) = reserve(node)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, RequestCancelled)
    assert node.core.idle
    assert node.pool_is_whole()


def test_an_abort_of_an_earlier_attempt_does_not(node: Node) -> None:
    node.core.handle(FromRouter(EPOCH, Abort(WorkId(EPOCH, "r", 0))), 0.5)
    assert isinstance(reserve(node)[0], Grant)


def test_who_has_no_stream_is_not_heard(node: Node) -> None:
    node.core.handle(FromPeer("stranger", Reserve(WORK, node.incarnation, 10, (), 1, 60.0, 20)), 1.0)
    assert answers(node) == []
    assert isinstance(reserve(node)[0], Grant), "it counted as this work's"


def test_a_lease_is_its_prefill_nodes_alone_also_when_it_is_over(node: Node, sender: KvSender) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    for part in range(grant.num_parts):
        assert sender.send(node.incarnation, grant.lease, part, [1, 2][: 2 - part], checked=True)
        node.transport.hub.deliver_all()
        answers(node)
    node.core.handle(PeerOpened("other", PART_BLOCKS), 1.5)
    commit = Commit(
        grant.lease, WORK, node.incarnation, tuple(range(2, 12)), (Sample(0, (5,)),), SamplingParams(), 60.0
    )

    def committed(peer: str) -> object:
        node.core.handle(FromPeer(peer, commit), 1.5)
        (reply,) = [o.message for o in node.core.take_outputs() if isinstance(o, ToPrefill)]
        return reply.error

    node.model.lied_to = frozenset({EPOCH})  # the blocks are full of sevens
    assert isinstance(committed("other"), RequestCancelled)
    assert committed(PEER) is None
    answers(node)
    assert node.core.engine.num_running == 1
    assert committed(PEER) is None
    assert isinstance(committed("other"), RequestCancelled)


def test_leases_of_a_lost_prefill_node_end(node: Node) -> None:
    assert isinstance(reserve(node)[0], Grant)
    assert not node.pool_is_whole()
    node.core.handle(PeerClosed(PEER, "died"), 1.5)
    (end,) = [kind for kind in answers(node) if isinstance(kind, End)]
    assert isinstance(end.error, PeerLost)
    assert node.core.idle
    assert node.pool_is_whole()


def test_a_part_that_is_under_way_when_its_lease_ends_touches_no_block(node: Node, sender: KvSender) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    assert sender.send(node.incarnation, grant.lease, 0, [1, 2], checked=True)
    before = node.model.pool_bytes.clone()
    node.core.handle(FromPeer(PEER, Release(grant.lease, WORK)), 1.5)
    assert node.pool_is_whole()  # and others may have them
    node.transport.hub.deliver_all()
    assert torch.equal(node.model.pool_bytes, before)
    answers(node)
    node.check_integrity()


def test_a_part_that_has_landed_when_its_lease_ends_is_no_news(node: Node, sender: KvSender) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    assert sender.send(node.incarnation, grant.lease, 0, [1, 2], checked=True)
    before = node.model.pool_bytes.clone()
    node.transport.hub.deliver_all()
    assert (node.model.pool_bytes != before).any(1).sum() == PART_BLOCKS, "a part waits for a turn of the engine"
    node.core.handle(FromPeer(PEER, Release(grant.lease, WORK)), 1.5)
    assert node.pool_is_whole()
    node.model.pool_bytes.copy_(before)  # the blocks are others'
    answers(node)
    assert torch.equal(node.model.pool_bytes, before)
    node.check_integrity()


def test_a_released_lease_is_confirmed_so_that_it_can_be_forgotten(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    node.core.handle(FromPeer(PEER, Release(grant.lease, WORK)), 1.5)
    (confirmed,) = answers(node)
    assert isinstance(confirmed, Refuse)
    assert confirmed.work == WORK
    assert node.pool_is_whole()
