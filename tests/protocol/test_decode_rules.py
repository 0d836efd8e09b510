"""Rules of the decode node that a race shows only now and then, each by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, PeerLost, RequestCancelled
from baton.handoff_messages import Commit, CommitReply, Credit, Grant, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, End, Prefill, Sample, Update
from baton.sampling import SamplingParams
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from decode_node.core import DecodeCore
from kv_transfer.parts import slot_bytes_for
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryTransport
from node import fences
from node.events import (
    CloseSession,
    FromPeer,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    ToPrefill,
)
from tests.protocol.network import EPOCH
from tests.protocol.node import PART_BLOCKS, Node
from tests.protocol.world import World

WORK = AttemptId(EPOCH, "r", 1)
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
    node.connect(PEER, [transport.info()])
    transport.connect(node.incarnation, node.transport.info())
    node.core.handle(SessionOpened(EPOCH), 0.0)
    node.core.handle(PeerOpened(PEER, PART_BLOCKS, layout, "its name"), 0.0)
    return sender


def reserve(node: Node, attempt_id: AttemptId = WORK) -> list[object]:
    """What the prefill node is answered."""
    message = Reserve(attempt_id, node.incarnation, 10, (), 1, 60.0, 20)
    node.core.handle(FromPeer(PEER, message), 1.0)
    return answers(node)


def answers(node: Node) -> list[object]:
    node.core.prepare(2.0)
    node.core.compute(2.0)
    said = [o for o in node.core.take_outputs() if isinstance(o, ToPrefill | Update)]
    return [o.message if isinstance(o, ToPrefill) else o.kind for o in said]


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_of_layers_that_the_model_has_not_are_refused(node: Node, groups: int) -> None:
    message = Reserve(WORK, node.incarnation, 10, (), 1, 60.0, 20, layer_groups=groups)
    node.core.handle(FromPeer(PEER, message), 1.0)
    (refused,) = answers(node)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, InvalidRequest)


@pytest.mark.parametrize("aborted", [1, 2])
def test_an_abort_wins_against_a_reserve_that_it_overtook(node: Node, aborted: int) -> None:
    node.core.handle(Abort(AttemptId(EPOCH, "r", aborted)), 0.5)
    (refused,) = reserve(node)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, RequestCancelled)
    assert node.core.idle
    assert node.pool_is_whole()


def test_an_abort_of_an_earlier_attempt_does_not(node: Node) -> None:
    node.core.handle(Abort(AttemptId(EPOCH, "r", 0)), 0.5)
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
    node.core.handle(PeerOpened("other", PART_BLOCKS, node.model.layout), 1.5)
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
    assert end.error.message == "prefill node its name: died"
    assert node.core.idle
    assert node.pool_is_whole()


def test_a_part_that_is_under_way_when_its_lease_ends_touches_no_block(node: Node, sender: KvSender) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    assert sender.send(node.incarnation, grant.lease, 0, [1, 2], checked=True)
    before = node.model.pool_bytes.clone()
    node.core.handle(FromPeer(PEER, Release(WORK)), 1.5)
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
    node.core.handle(FromPeer(PEER, Release(WORK)), 1.5)
    assert node.pool_is_whole()
    node.model.pool_bytes.copy_(before)  # the blocks are others'
    answers(node)
    assert torch.equal(node.model.pool_bytes, before)
    node.check_integrity()


def test_a_released_lease_is_confirmed_so_that_it_can_be_forgotten(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    node.core.handle(FromPeer(PEER, Release(WORK)), 1.5)
    (confirmed,) = answers(node)
    assert isinstance(confirmed, Refuse)
    assert confirmed.attempt_id == WORK
    assert node.pool_is_whole()


def ask(node: Node, name: str, num_tokens: int, deadline_s: float = 60.0, now: float = 1.0) -> AttemptId:
    """A Reserve of a request of that name."""
    attempt_id = AttemptId(EPOCH, name, 1)
    node.core.handle(FromPeer(PEER, Reserve(attempt_id, node.incarnation, num_tokens, (), 1, deadline_s, 40)), now)
    return attempt_id


def run_here(node: Node, name: str, num_tokens: int, max_tokens: int = 30) -> AttemptId:
    """A prompt of its own, which is in its first step then."""
    attempt_id = AttemptId(EPOCH, name, 1)
    prompt = tuple(2 + (i + len(name)) % 90 for i in range(num_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    node.core.handle(Prefill(attempt_id, node.incarnation, prompt, (Sample(0),), sampling, 60.0), 1.0)
    answers(node)
    return attempt_id


def step(node: Node) -> list[object]:
    """The device computes what it was given, and a turn follows."""
    while node.model.is_busy:
        node.model.advance()
    return answers(node)


def granted(said: Sequence[object]) -> list[AttemptId]:
    return [message.attempt_id for message in said if isinstance(message, Grant)]


def num_free(node: Node) -> int:
    return node.core.engine.blocks.num_free + node.core.engine.blocks.num_cached


def test_a_reserve_of_a_router_that_is_not_subscribed_is_refused(node: Node) -> None:
    """Nobody could be told what becomes of it, and nobody would abort it."""
    (refused,) = reserve(node, AttemptId(EPOCH + 1, "r", 1))
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, NodeUnavailable)
    node.core.handle(SessionLost(EPOCH), 1.0)
    (refused,) = reserve(node)
    assert isinstance(refused, Refuse)
    assert node.core.idle


def test_preempted_requests_come_before_any_grant() -> None:
    (node,) = World(num_prefill=0, num_decode=1, num_blocks=18).nodes.values()
    node.core.handle(SessionOpened(EPOCH), 0.0)
    node.core.handle(PeerOpened(PEER, PART_BLOCKS, node.model.layout), 0.0)
    for name in ("old", "young"):
        run_here(node, name, 24)
    engine = node.core.engine
    for _ in range(30):
        if not engine.waiting.has_preempted(float("inf")):
            step(node)
    ask(node, "r", 4)
    assert engine.waiting.has_preempted(float("inf"))
    assert num_free(node) >= 2 + 1, "it would fit"
    for _ in range(60):
        was_preempted, said = engine.waiting.has_preempted(float("inf")), step(node)
        assert not (was_preempted and engine.waiting.has_preempted(float("inf")) and granted(said))
        if granted(said):
            return
    raise AssertionError("never granted")


@pytest.mark.parametrize("fits", [True, False])
def test_a_grant_leaves_a_block_for_each_request_that_runs(node: Node, fits: bool) -> None:
    run_here(node, "one", 8)
    run_here(node, "another", 8)
    for _ in range(3):
        step(node)
    assert node.core.engine.num_running == 2
    num_blocks = num_free(node) - (2 if fits else 1)
    attempt_id = ask(node, "r", 4 * (num_blocks - 1))
    node.core.prepare(2.0)
    said = [o.message for o in node.core.take_outputs() if isinstance(o, ToPrefill)]
    assert granted(said) == ([attempt_id] if fits else [])


def test_whoever_waits_ends_at_its_own_deadline_and_not_at_that_of_the_first(node: Node) -> None:
    assert granted([*reserve(node)])
    first = ask(node, "first", 4 * 38, deadline_s=60.0)
    second = ask(node, "second", 4 * 38, deadline_s=0.5)
    assert node.core.next_deadline() == 1.5
    (refused,) = answers(node)  # at 2.0
    assert isinstance(refused, Refuse)
    assert refused.attempt_id == second
    assert isinstance(refused.error, DeadlineExceeded)
    assert node.core.next_deadline() == 61.0
    node.core.handle(Abort(first), 2.0)
    assert [message.attempt_id for message in answers(node) if isinstance(message, Refuse)] == [first]


def test_one_that_leaves_the_midst_of_the_queue_lets_the_others_keep_their_order(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    waiting = [ask(node, str(i), 4 * 38) for i in range(4)]
    node.core.handle(FromPeer(PEER, Release(waiting[1])), 1.0)
    node.core.handle(FromPeer("somebody else", Release(waiting[2])), 1.0)
    assert not answers(node)
    node.core.handle(FromPeer(PEER, Release(WORK)), 1.0)
    assert granted(answers(node)) == [waiting[0]]
    node.core.handle(Abort(waiting[0]), 1.0)
    assert granted(answers(node)) == [waiting[2]]


def commit(grant: Grant, deadline_s: float, structured: StructuredOutput | None = None) -> Commit:
    sampling = SamplingParams(max_tokens=5, structured_outputs=structured)
    prompt = tuple(range(2, 12))
    return Commit(grant.lease, grant.attempt_id, "d", prompt, (Sample(0, (3,)),), sampling, deadline_s)


def test_a_commit_says_the_same_deadline_again_and_cannot_prolong_it(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    node.core.handle(FromPeer(PEER, commit(grant, 1e9)), 1.0)
    assert [message.error for message in answers(node) if isinstance(message, CommitReply)] == [None]
    assert node.core.next_deadline() == 61.0


def test_a_node_without_structured_outputs_refuses_a_request_for_one_that_was_prefilled_elsewhere(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    structured = StructuredOutput(StructuredKind.REGEX, "[0-9]+")
    node.core.handle(FromPeer(PEER, commit(grant, 60.0, structured)), 1.0)
    (reply,) = (message for message in answers(node) if isinstance(message, CommitReply))
    assert isinstance(reply.error, InvalidRequest)
    assert node.core.idle
    node.core.check_integrity()


def test_the_answer_to_a_commit_is_remembered_until_it_cannot_come_again(node: Node) -> None:
    (grant,) = reserve(node)
    assert isinstance(grant, Grant)
    core = node.core
    assert isinstance(core, DecodeCore)
    core.handle(Abort(WORK), 1.0)
    for now, num_known in ((61.0, 1), (61.0 + fences.UNDER_WAY_S, 0)):
        core.prepare(now)
        assert len(core._reservations._outcomes) == num_known
        core.take_outputs()
        core.handle(FromPeer(PEER, commit(grant, 1.0)), now)
        (reply,) = answers(node)
        assert isinstance(reply, CommitReply)
        assert isinstance(reply.error, RequestCancelled)


def test_no_request_has_more_time_than_the_node_allows(node: Node) -> None:
    ask(node, "r", 10, deadline_s=1e10)
    assert node.core.next_deadline() == 1.0 + 3600.0


def test_a_lease_that_is_short_of_slots_gets_them_when_others_have_used_theirs(node: Node, sender: KvSender) -> None:
    """Of three slots, the first lease has two and the second one; each part that lands frees one."""
    hub = node.transport.hub
    grants = [message for name in ("a", "b") if ask(node, name, 22) for message in answers(node)]
    assert [(g.num_parts, g.credits) for g in grants if isinstance(g, Grant)] == [(3, 2), (3, 1)]
    assert answers(node) == []
    first = grants[0]
    assert isinstance(first, Grant)
    assert sender.send(node.incarnation, first.lease, 0, [1, 2], checked=True)
    hub.deliver_all()
    sender.poll()
    assert [message.lease for message in answers(node) if isinstance(message, Credit)] == [first.lease]


def test_a_router_whose_aborts_leave_too_much_behind_loses_its_session(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "MAX_LEFT", 3)
    node.core.take_outputs()  # its session begins with a snapshot of the prefix cache
    for i in range(3):
        node.core.handle(Abort(AttemptId(EPOCH, f"r{i}", 0)), 1.0)
    assert not node.core.take_outputs()
    node.core.handle(Abort(AttemptId(EPOCH, "r3", 0)), 1.0)
    (close,) = node.core.take_outputs()
    assert isinstance(close, CloseSession)
    assert close.epoch == EPOCH
