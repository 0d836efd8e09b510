"""Routers' sessions over real gRPC: subscription, order, batching, replacement, loss."""

import asyncio
from unittest.mock import AsyncMock

import grpc
import pytest

from baton import PROTOCOL_VERSION, wire
from baton.errors import InvalidRequest, RequestCancelled
from baton.messages import (
    Abort,
    AttemptId,
    End,
    KvEvents,
    Load,
    Prefill,
    SampleEnd,
    Subscribe,
    Subscribed,
    TokenLogprobs,
    Tokens,
    Update,
    UpdateKind,
)
from baton.node_info import NodeRole
from baton.prompt_logprobs import PromptLogprobs
from baton.rpc.streams import STOPPED, Stream
from baton.rpc.trust import Trust
from baton.sampling import FinishReason
from baton.telemetry import NodeMetrics, new_registry
from baton.v1 import node_pb2, node_pb2_grpc
from baton.wire import Limits
from decode_node.server import DECODE_SIDE
from node import sessions
from node.events import (
    BlocksChanged,
    BlocksHeld,
    BlocksWanted,
    CloseSession,
    SessionLost,
    SessionOpened,
)
from node.loop import Turn
from node.sessions import Sessions
from prefill_node.server import PREFILL_SIDE
from router.placement.prefix_index import PrefixIndex
from tests.node.scripted import RouterStream, prefill, running, session

WORK = AttemptId(1, "r", 0)


def answer(event):
    """Three updates for each message, all of one turn."""
    if not isinstance(event, Prefill | Abort):
        return []
    kinds = (Tokens(0, 0, (7,)), Tokens(0, 1, (8,)), End())
    return [Update(event.attempt_id, kind) for kind in kinds]


async def test_a_session_from_subscription_to_loss():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=answer) as node:
        async with session(node) as router:
            assert await router.read() == Subscribed("i1")
            assert await router.read() == Load(num_blocks_free=3, num_blocks_total=3)
            await router.send(prefill(WORK))
            updates = await router.updates()
            assert [u.kind for u in updates] == [Tokens(0, 0, (7,)), Tokens(0, 1, (8,)), End()]
            await router.send(Abort(WORK))
            await router.updates()
        await node.role.saw(SessionLost)
        kinds = [type(event) for event in node.role.events]
        assert kinds == [SessionOpened, Prefill, Abort, SessionLost]


async def test_that_a_node_stops_is_told_at_once(monkeypatch):
    """Until then the router places work there, which is refused."""
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 3600.0)
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        assert await router.read() == Subscribed("i1")
        assert await router.read() == node.role.state
        node.role.state = Load(draining=True)
        node.loop.wake()
        assert await router.read() == node.role.state


async def test_a_decode_node_has_the_same_sessions():
    async with (
        running(DECODE_SIDE, NodeRole.DECODE, script=answer) as node,
        RouterStream(node_pb2_grpc.DecodeNodeStub(node.channel), Subscribe(1, "i1")) as router,
    ):
        await router.send(prefill(WORK))
        assert len(await router.updates()) == 3


async def test_load_is_the_heartbeat_and_told_soon_after_a_change():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        seen = [await router.read() for _ in range(3)]
        assert seen[1:] == [node.role.state] * 2
        node.role.state = Load(num_running=1)
        node.loop.wake()
        while (load := await router.read()) == seen[1]:
            pass
        assert load == Load(num_running=1)


@pytest.mark.parametrize(
    ("subscribe", "code", "text"),
    [
        (
            Subscribe(1, "i1", protocol_version=99),
            "FAILED_PRECONDITION",
            f"protocol version 99, this node speaks {PROTOCOL_VERSION}",
        ),
        (Subscribe(1, "old"), "FAILED_PRECONDITION", "this is incarnation i1, not old"),
        (Abort(WORK), "INVALID_ARGUMENT", "a session opens with Subscribe"),
    ],
)
async def test_a_subscriber_that_does_not_fit_is_refused(subscribe, code, text):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        async with RouterStream(node_pb2_grpc.PrefillNodeStub(node.channel), subscribe) as router:
            assert await router.end() == (code, text)
        assert node.role.events == []


async def test_a_router_that_says_nothing_at_all_is_refused():
    async with (
        running(PREFILL_SIDE, NodeRole.PREFILL) as node,
        RouterStream(node_pb2_grpc.PrefillNodeStub(node.channel), None) as router,
    ):
        await router.call.done_writing()
        assert await router.end() == ("INVALID_ARGUMENT", "a session opens with Subscribe")


def answer_prompts(event):
    return answer(event) if isinstance(event, Prefill) else []


async def test_a_malformed_prompt_fails_that_request_alone():
    """The node's core hears of it as of one that is aborted, which is nothing to be answered here."""
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=answer_prompts) as node, session(node) as router:
        bad = node_pb2.RouterMessage(prefill={"attempt_id": {"router_epoch": 1, "request_id": "bad"}})
        await router.call.write(bad)
        (update,) = await router.updates()
        assert update.attempt_id == AttemptId(1, "bad", 0)
        assert isinstance(update.kind.error, InvalidRequest)
        await router.send(prefill(WORK))
        assert len(await router.updates()) == 3


async def test_several_messages_in_one_are_each_on_its_own():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=answer_prompts) as node, session(node) as router:
        bad = node_pb2.RouterMessage(prefill={"attempt_id": {"router_epoch": 1, "request_id": "bad"}})
        good = [wire.write_router_message(prefill(AttemptId(1, name, 0))) for name in ("a", "b")]
        await router.call.write(wire.join_router_messages([good[0], bad, good[1]]))
        told = list[str]()
        while len(told) < 7:
            told += [update.attempt_id.request_id for update in await router.updates()]
        assert sorted(told) == ["a"] * 3 + ["b"] * 3 + ["bad"]
        heard = [event for event in node.role.events if isinstance(event, Prefill | Abort)]
        assert [(type(m), m.attempt_id.request_id) for m in heard] == [(Prefill, "a"), (Abort, "bad"), (Prefill, "b")]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (prefill(AttemptId(2, "r", 0)), "work of another epoch than the session's"),
        (Subscribe(1, "i1"), "a second Subscribe"),
    ],
)
async def test_a_router_that_breaks_the_rules_loses_its_session(message, text):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        async with session(node) as router:
            await router.send(message)
            assert await router.end() == ("ABORTED", f"malformed message: {text}")
        assert await node.role.saw(SessionLost) == [SessionLost(1)]


async def test_a_second_session_of_an_epoch_takes_the_place_of_the_first():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=answer) as node:
        async with session(node) as first, session(node, epoch=2) as other:
            await first.read()
            await other.read()
            async with session(node) as second:
                assert await second.read() == Subscribed("i1")
                assert (await first.end())[0] == "ABORTED"
                await node.role.saw(SessionOpened, 3)
                opened = [e for e in node.role.events if e.epoch == 1]
                assert opened == [SessionOpened(1), SessionLost(1), SessionOpened(1)]
                await second.send(prefill(WORK))
                assert len(await second.updates()) == 3
                await other.send(prefill(AttemptId(2, "r", 0)))
                assert len(await other.updates()) == 3
        assert len(await node.role.saw(SessionLost, 3)) == 3


async def test_what_an_old_session_of_the_epoch_still_reads_is_no_work_of_the_new_one():
    """The router counts that work as lost, and nobody would wait for it."""
    posted = []
    hub = Sessions("i1", lambda event: posted.append(event) or len(posted), metrics(), Limits(), Trust())
    old = hub._open(1)
    hub._receive_all(old, wire.write_router_message(prefill(WORK)))
    new = hub._open(1)
    hub._receive_all(old, wire.write_router_message(prefill(AttemptId(1, "late", 0))))
    hub._receive_all(new, wire.write_router_message(prefill(AttemptId(1, "r", 1))))
    asked = [event.attempt_id for event in posted if isinstance(event, Prefill)]
    assert asked == [WORK, AttemptId(1, "r", 1)]


async def test_a_clean_end_and_a_vanished_router_are_both_losses():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        async with session(node) as router:
            await router.read()
            await router.call.done_writing()
            assert (await router.end())[0] == "OK"
        await node.role.saw(SessionLost, 1)
        async with grpc.aio.insecure_channel(node.address) as channel:
            call = node_pb2_grpc.PrefillNodeStub(channel).Session()
            subscribe = {"protocol_version": PROTOCOL_VERSION, "target_incarnation": "i1"}
            await call.write(node_pb2.RouterMessage(subscribe=subscribe))
            await call.read()
        await node.role.saw(SessionLost, 2)


async def test_deadlines_are_capped_by_the_node():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, request_timeout=2.0) as node, session(node) as router:
        await router.send(prefill(WORK, deadline_s=100.0))
        (heard,) = await node.role.saw(Prefill)
        assert heard.deadline_s == 2.0


async def test_what_an_earlier_session_of_the_epoch_was_told_is_not_told_to_the_next():
    posted = []
    hub = Sessions("i1", lambda event: posted.append(event) or len(posted), metrics(), Limits(), Trust())
    session_ = hub._open(1)

    def turn(num_handled):
        return Turn([Update(WORK, End(RequestCancelled()))], num_handled, Load(), True, None)

    hub.deliver(turn(0))
    assert await session_.take(0) == []
    hub.deliver(turn(1))
    assert len(await session_.take(0)) == 1


async def test_what_is_told_to_a_session_that_is_over_leaves_nothing_behind():
    """A role that has yet to hear of the end says more, and never that the request has ended."""
    kept = metrics()
    hub = Sessions("i1", lambda event: 1, kept, Limits(), Trust())
    hub._close(hub._open(1), "gone")
    hub.deliver(Turn([Update(WORK, Tokens(0, 0, (7,)))], 1, Load(), True, None))
    assert not kept._tokens._last


async def test_a_session_that_the_role_closes_ends_and_a_later_one_of_the_epoch_does_not():
    hub = Sessions("i1", lambda event: 3, metrics(), Limits(), Trust())
    session_ = hub._open(1)
    for num_handled in (2, 3):
        assert not session_._end.done()
        hub.deliver(Turn([CloseSession(1, "too many aborts")], num_handled, Load(), True, None))
    assert await session_.until_end() == "too many aborts"


async def test_what_is_queued_when_the_node_stops_is_sent_before_the_session_ends():
    hub = Sessions("i1", lambda event: 1, metrics(), Limits(), Trust())
    session_, context, last = hub._open(1), AsyncMock(), Update(WORK, End())
    hub.deliver(Turn([last], 1, Load(draining=True), True, None))
    hub.close()
    assert await hub._write(session_, context) == STOPPED
    written = [wire.read_node_message(call.args[0]) for call in context.write.await_args_list]
    assert [said for said in written if not isinstance(said, Load)] == [(last,)]
    assert hub._open(2).closing == STOPPED, "one that comes meanwhile ends, too"


async def test_a_stream_whose_peer_does_not_read_ends():
    stream = Stream(limit=3)
    stream.put(1, 2, 3)
    assert await stream.take(0) == [1, 2, 3]
    stream.put(1, 2, 3)
    stream.put(4)
    async with asyncio.timeout(5):
        assert await stream.until_end() == "the peer does not read"
    stream.end("another reason")
    assert await stream.until_end() == "the peer does not read"


def metrics() -> NodeMetrics:
    return NodeMetrics(new_registry("prefill"), "tiny")


async def test_many_updates_go_in_messages_of_bounded_size(monkeypatch):
    monkeypatch.setattr(sessions, "UPDATES_PER_MESSAGE", 2)
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=answer) as node, session(node) as router:
        await router.send(prefill(WORK))
        assert [len(await router.updates()) for _ in range(2)] == [2, 1]


async def test_a_samples_end_travels_with_its_last_token(monkeypatch):
    """A node that died between two messages would leave a sample that goes on after its end, elsewhere."""
    monkeypatch.setattr(sessions, "UPDATES_PER_MESSAGE", 3)
    async with (
        running(DECODE_SIDE, NodeRole.DECODE) as node,
        RouterStream(node_pb2_grpc.DecodeNodeStub(node.channel), Subscribe(1, "i1")) as router,
    ):
        await router.read()
        tokens, end = [Tokens(0, index, (7,)) for index in range(5)], SampleEnd(0, FinishReason.STOP)
        kinds: list[UpdateKind] = [*tokens[:3], end, *tokens[3:], end, End()]
        node.say(*[Update(WORK, kind) for kind in kinds])
        said = [[update.kind for update in await router.updates()] for _ in range(3)]
        assert said == [kinds[:4], kinds[4:7], kinds[7:]]


async def test_logprobs_of_prompts_go_in_messages_of_bounded_size(monkeypatch):
    """A router that stood still for a while gets thousands of pieces, of 172 KB each."""
    piece = PromptLogprobs(1, 1, bytes(4), bytes(4), bytes(4), bytes(4))
    monkeypatch.setattr(sessions, "LOGPROBS_BYTES_PER_MESSAGE", 2 * 16)
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        await router.read()
        kinds: list[UpdateKind] = [piece, End(), piece, piece, End(), piece]
        node.say(*[Update(WORK, kind) for kind in kinds])
        assert [[update.kind for update in await router.updates()] for _ in range(2)] == [kinds[:3], kinds[3:]]


async def test_logprobs_of_tokens_go_in_messages_of_bounded_size():
    """Each token may have as many as the vocabulary: 1.2 MB of them."""
    entry = TokenLogprobs(-1.0, tuple((token, -2.0) for token in range(8191)))
    tokens: list[UpdateKind] = [Tokens(0, index, (7,), (entry,)) for index in range(5)]
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        await router.read()
        node.say(*[Update(WORK, kind) for kind in (*tokens, End())])
        said = [[update.kind for update in await router.updates()] for _ in range(3)]
        assert said == [tokens[:2], tokens[2:4], [tokens[4], End()]]


# ---- what the prefix cache holds ----

BLOCKS = [number.to_bytes(32, "little") for number in range(100_000)]


class ManyBlocks:
    """A role's prefix cache, as far as its events go."""

    def __init__(self, num_blocks: int) -> None:
        self.held = BLOCKS[:num_blocks]

    def __call__(self, event):
        if isinstance(event, SessionOpened | BlocksWanted):
            return [BlocksHeld(event.epoch, tuple(self.held))]
        return []


async def blocks_of(router: RouterStream, index: PrefixIndex, wanted: int) -> list[KvEvents]:
    """What the router reads until it knows of so many blocks."""
    seen = []
    while index.num_blocks("i1") != wanted or not seen:
        if isinstance(message := await router.read(), KvEvents):
            index.apply("i1", message)
            seen.append(message)
    return seen


def empty_index() -> PrefixIndex:
    index = PrefixIndex()
    index.add("i1", len(BLOCKS))
    return index


async def test_a_session_begins_with_all_blocks_and_goes_on_with_what_changes():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=ManyBlocks(5000)) as node:
        async with session(node) as router, session(node, epoch=2) as other:
            for reader in (router, other):
                index = empty_index()
                pieces = await blocks_of(reader, index, 5000)
                assert [(p.sequence, p.snapshot) for p in pieces] == [(number, number == 0) for number in range(20)]
            node.say(BlocksChanged({BLOCKS[0]: False, BLOCKS[6000]: True}), BlocksChanged({BLOCKS[7000]: True}))
            for reader in (router, other):
                [change] = await blocks_of(reader, index, 5001)
                assert (set(change.stored), change.removed) == ({BLOCKS[6000], BLOCKS[7000]}, (BLOCKS[0],))
                index = empty_index()
                index.apply("i1", KvEvents(19, tuple(BLOCKS[:5000]), snapshot=True))
        async with session(node, epoch=3) as late:
            assert (await blocks_of(late, empty_index(), 5000))[0].snapshot


async def test_a_router_that_reads_too_slowly_gets_a_new_snapshot():
    role = ManyBlocks(10)
    async with running(PREFILL_SIDE, NodeRole.PREFILL, script=role) as node, session(node) as router:
        index = empty_index()
        await blocks_of(router, index, 10)
        role.held = BLOCKS[100:120]
        node.say(BlocksChanged(dict.fromkeys(BLOCKS[10:90_000], True)))  # more at once than waits for any router
        again = await blocks_of(router, index, 20)
        assert again[0].snapshot
        assert index.held(BLOCKS[100:120]) == {"i1": 20}
        assert len(await node.role.saw(BlocksWanted)) == 1
