"""Handoff streams between two nodes over real gRPC: Hello, order, ends that are told exactly once."""

import asyncio
import dataclasses
import gc
import threading
from array import array
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from baton import PROTOCOL_VERSION, wire
from baton.errors import RequestCancelled
from baton.handoff_messages import Commit, CommitReply, Credit, Grant, Heartbeat, Hello, Refuse, Release, Reserve
from baton.layout import KvSlice
from baton.messages import AttemptId, DecodeTarget, Sample
from baton.node_info import NodeRole, TransportEndpoint
from baton.rpc.trust import Trust
from baton.sampling import SamplingParams
from baton.v1 import node_pb2_grpc
from baton.wire import Limits
from decode_node import handoffs
from decode_node.handoffs import HandoffServer
from decode_node.server import DECODE_SIDE, DecodeNode
from node.events import ClosePeer, FromPeer, PeerClosed, PeerOpened, TargetEvent, ToDecode, ToPrefill
from node.handoffs.decode_links import IDLE_S, DecodeLinks
from node.handoffs.stream import HandoffEnd, HandoffStream, connect
from node.loop import Turn
from node.shell import RoleSide, make_hello
from prefill_node.server import PREFILL_SIDE
from tests.node.scripted import LAYOUT, WAIT_S, NotingTransport, Running, running

WORK = AttemptId(1, "r", 0)
COMMIT = Commit(1, WORK, "d1", array("I", (1, 2)), (Sample(0, (3,)),), SamplingParams(), 5.0)
GRANT = Grant(WORK, 1, 0, 1, 1)


def reserve(attempt_id: AttemptId = WORK) -> Reserve:
    return Reserve(attempt_id, "d1", 2, (), 1, 5.0, 8)


def target(node: Running, incarnation: str = "d1") -> DecodeTarget:
    return DecodeTarget(node.address, incarnation)


@asynccontextmanager
async def pair(prefill=PREFILL_SIDE, decode=DECODE_SIDE, **decode_fields):
    """A prefill node p1 and a decode node d1."""
    async with AsyncExitStack() as stack:
        decode_fields = {"incarnation": "d1"} | decode_fields
        d = await stack.enter_async_context(running(decode, NodeRole.DECODE, **decode_fields))
        p = await stack.enter_async_context(running(prefill, NodeRole.PREFILL, incarnation="p1"))
        yield p, d


def with_links(idle_s: float = IDLE_S, **fields) -> RoleSide:
    """A prefill side whose links have other patience."""
    return RoleSide(
        PREFILL_SIDE.service,
        lambda server, sessions, parts, ours: [DecodeLinks(dataclasses.replace(ours, **fields), idle_s=idle_s)],
    )


async def closed(node: Running) -> PeerClosed:
    """The one PeerClosed of the node, whose transport was disconnected before."""
    (event,) = await node.role.saw(PeerClosed)
    assert node.transport.notes[-1] == ("disconnect", event.peer)
    assert [e for e in node.role.events if isinstance(e, PeerClosed)] == [event]
    return event


async def test_a_reserve_opens_the_stream_and_messages_pass_in_order_both_ways():
    async with pair() as (p, d):
        p.say(ToDecode(target(d), reserve()), ToDecode(target(d), COMMIT))
        assert [e.message for e in await d.role.saw(FromPeer, 2)] == [reserve(), COMMIT]
        assert d.role.events[0] == PeerOpened("p1", 4, LAYOUT, "prefill-0")
        assert await p.role.saw(PeerOpened) == [PeerOpened("d1", 4, LAYOUT, "decode-0")]
        d.say(ToPrefill("p1", GRANT), ToPrefill("p1", Credit(1, 1)), ToPrefill("p1", CommitReply(1, WORK)))
        events = await p.role.saw(FromPeer, 3)
        assert [e.message for e in events] == [GRANT, Credit(1, 1), CommitReply(1, WORK)]
        assert {e.peer for e in events} == {"d1"}
        assert p.transport.notes == [("connect", "d1")]
        assert d.transport.notes == [("connect", "p1")]


async def test_a_decode_node_hands_over_to_another_one_like_a_prefill_node():
    async with (
        running(DECODE_SIDE, NodeRole.DECODE, incarnation="d1") as d,
        running(DECODE_SIDE, NodeRole.DECODE, incarnation="d2") as old,
    ):
        old.say(ToDecode(target(d), reserve()))
        assert [e.message for e in await d.role.saw(FromPeer)] == [reserve()]
        assert d.role.events[0] == PeerOpened("d2", 4, LAYOUT, "decode-0")
        d.say(ToPrefill("d2", GRANT))
        opened, heard = await old.role.saw(TargetEvent, 2)
        assert opened == TargetEvent(PeerOpened("d1", 4, LAYOUT, "decode-0"))
        assert heard == TargetEvent(FromPeer("d1", GRANT))
        assert d.transport.notes == [("connect", "d2")]
        assert old.transport.notes == [], "it has another transport for that"
        d.say(ClosePeer("d2", "lost"))
        assert isinstance((await old.role.saw(TargetEvent, 3))[-1].event, PeerClosed)


@pytest.mark.parametrize(("mine", "theirs"), [(4, 6), (4, 3)])
async def test_each_side_knows_how_many_blocks_fit_into_the_others_slots(mine, theirs):
    async with pair(part_blocks=theirs) as (p, d):
        p.say(ToDecode(target(d), reserve()))
        for node, peer, part_blocks in ((p, "d1", theirs), (d, "p1", mine)):
            (opened,) = await node.role.saw(PeerOpened)
            assert (opened.peer, opened.part_blocks) == (peer, part_blocks)


async def test_the_streams_end_is_told_once_on_both_sides():
    async with pair() as (p, d):
        p.say(ToDecode(target(d), reserve()))
        await p.role.saw(PeerOpened)
        p.say(ClosePeer("d1", "its transport is gone"))
        assert (await closed(p)).reason == "its transport is gone"
        assert (await closed(d)).peer == "p1"


@pytest.mark.parametrize("num_more", [0, 5000])
async def test_the_decode_node_can_end_it_too(num_more: int):
    """Also while the prefill node writes, which makes gRPC forget what the decode node said."""
    async with pair() as (p, d):
        p.say(ToDecode(target(d), reserve()), *[ToDecode(target(d), COMMIT)] * num_more)
        await d.role.saw(FromPeer)
        d.say(ClosePeer("p1", "its transport is gone"))
        assert (await closed(d)).reason == "its transport is gone"
        assert (await closed(p)).reason == "ABORTED: its transport is gone"


async def test_a_prefill_node_that_leaves_is_told_so():
    """gRPC cancels what serves its stream; an error that says "cancelled" would be taken for the client's doing."""
    async with pair() as (_, d):
        async with opened(d) as call:
            await hear(call)
        assert (await closed(d)).reason == "the peer ended the call, or its connection was lost"


async def test_only_a_reserve_opens_a_stream():
    async with pair() as (p, d):
        p.say(ToDecode(target(d), Release(WORK)), ToDecode(target(d), COMMIT))
        p.say(ToDecode(target(d), reserve()))
        assert [e.message for e in await d.role.saw(FromPeer)] == [reserve()]


BY_HEADS = (KvSlice(0, 2, 0, 1), KvSlice(0, 2, 1, 2))
MOST_PARTS = 2 * 4 * 2
"""Of a context of four blocks with two layers each, for each of two pairs of ranks."""


async def test_nodes_of_unlike_ranks_are_connected_and_a_grant_may_have_parts_for_each_pair():
    layout = dataclasses.replace(LAYOUT, ranks=BY_HEADS)
    async with pair(layout=layout) as (p, d):
        p.say(ToDecode(target(d), reserve()))
        assert await p.role.saw(PeerOpened) == [PeerOpened("d1", 4, layout, "decode-0")]
        assert await d.role.saw(PeerOpened) == [PeerOpened("p1", 4, LAYOUT, "prefill-0")]
        assert [(route.rank, route.peer_rank) for route in p.transport.routes["d1"]] == [(0, 0), (0, 1)]
        assert [(route.rank, route.peer_rank) for route in d.transport.routes["p1"]] == [(0, 0), (1, 0)]
        most = dataclasses.replace(GRANT, num_parts=MOST_PARTS)
        d.say(ToPrefill("p1", most), ToPrefill("p1", dataclasses.replace(most, num_parts=MOST_PARTS + 1)))
        granted, refused = [event.message for event in await p.role.saw(FromPeer, 2)]
        assert granted == most
        assert isinstance(refused, Refuse)


OTHER_LAYOUT = dataclasses.replace(LAYOUT, block_size=32)


@pytest.mark.parametrize(
    ("fields", "incarnation", "reason"),
    [
        ({"layout": OTHER_LAYOUT}, "d1", "LayoutMismatch block_size 32 != 16 of prefill-0"),
        ({"part_blocks": 0}, "d1", "TransferError decode-0 takes no block in a part"),
        ({"incarnation": "d2"}, "d1", "NodeUnavailable this is incarnation d2, not d1"),
    ],
)
async def test_nodes_that_do_not_fit_say_why(fields, incarnation, reason):
    async with pair(**fields) as (p, d):
        p.say(ToDecode(target(d, incarnation), reserve()))
        assert (await closed(p)).reason == reason
        assert not [e for e in d.role.events if isinstance(e, FromPeer)]


async def test_a_transport_that_cannot_connect_is_a_reason():
    async with pair() as (p, d):
        d.transport.refuse = "no route"
        p.say(ToDecode(target(d), reserve()))
        assert (await closed(p)).reason == "TransferError no route"
        assert d.role.events == []


async def test_a_connect_that_fails_once_it_was_given_up_troubles_nobody(caplog):
    go = threading.Event()

    class Slow(NotingTransport):
        def connect(self, peer, address, timeout_s):
            assert go.wait(WAIT_S)
            super().connect(peer, address, timeout_s)

    call = asyncio.create_task(connect(Slow(refuse="no route"), "p", []))
    await asyncio.sleep(0)  # it begins
    call.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    del call
    await asyncio.sleep(0)  # the loop lets go of it too
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_node_that_is_not_there_is_a_reason():
    async with pair() as (p, _):
        p.say(ToDecode(DecodeTarget("127.0.0.1:9", "d9"), reserve()))
        assert (await closed(p)).reason.startswith("UNAVAILABLE: ")


async def test_what_was_said_before_the_end_was_heard_is_dropped_and_a_new_reserve_opens_again():
    async with pair() as (p, d):
        posted: list = []
        links = DecodeLinks(
            HandoffEnd(
                hello=make_hello(p.info, 4),
                transport=p.transport,
                post=lambda e: posted.append(e) or len(posted),
                handled=asyncio.get_running_loop().create_future,
                trust=Trust(),
                limits=Limits(),
                silence_s=WAIT_S,
            )
        )

        def turn(num_handled, *outputs):
            links.deliver(Turn([ToDecode(target(d), o) for o in outputs], num_handled, p.role.state, True, None))

        turn(0, reserve())
        await d.role.saw(FromPeer)
        links._links["d1"].end("test")
        await asyncio.gather(*links._tasks)
        number = len(posted)
        assert isinstance(posted[-1], PeerClosed)
        turn(number - 1, reserve(AttemptId(1, "late", 0)))
        assert links._links == {}
        turn(number, reserve(AttemptId(1, "new", 0)))
        seen = [e.message.attempt_id.request_id for e in await d.role.saw(FromPeer, 2)]
        assert seen == ["r", "new"]
        await links.close()


async def test_an_idle_stream_is_closed_but_not_while_a_handoff_is_under_way():
    async with pair(prefill=with_links(idle_s=0.0)) as (p, d):
        p.say(ToDecode(target(d), reserve()))
        await d.role.saw(FromPeer)
        assert not [e for e in p.role.events if isinstance(e, PeerClosed)]
        d.say(ToPrefill("p1", Refuse(WORK, RequestCancelled("over"))))
        assert (await closed(p)).reason == "idle for 0 s"
        await closed(d)


async def test_a_stream_that_is_used_while_it_is_closed_for_want_of_use_is_opened_again(monkeypatch):
    """The request would be lost with the old one, and its decode node blamed for that."""
    write_all, late = HandoffStream._write_all, [reserve(AttemptId(1, "late", 0))]

    async def write_until_idle(stream, write, idle_s):
        reason = await write_all(stream, write, idle_s)
        while late:
            stream.send(late.pop())
        return reason

    monkeypatch.setattr(HandoffStream, "_write_all", write_until_idle)
    async with pair(prefill=with_links(idle_s=0.0)) as (p, d):
        p.say(ToDecode(target(d), reserve()))
        await d.role.saw(FromPeer)
        d.say(ToPrefill("p1", Refuse(WORK, RequestCancelled("over"))))
        _, second = await d.role.saw(FromPeer, 2)
        assert second.message == reserve(AttemptId(1, "late", 0))
        assert [type(event) for event in d.role.events] == [PeerOpened, FromPeer, PeerClosed, PeerOpened, FromPeer]
        assert not [event for event in p.role.events if isinstance(event, PeerClosed)]
        assert [note for note, _ in p.transport.notes] == ["connect", "disconnect", "connect"]


async def test_a_second_stream_of_a_prefill_node_takes_the_place_of_the_first():
    async with pair() as (_, d):
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(opened(d))
            assert isinstance(await hear(first), Hello)
            second = await stack.enter_async_context(opened(d))
            assert isinstance(await hear(second), Hello)
            assert await end_of(first) == "a new stream of the peer took its place"
            await d.role.saw(PeerOpened, 2)
            kinds = [type(e) for e in d.role.events]
            assert kinds == [PeerOpened, PeerClosed, PeerOpened]
            assert [n for n, _ in d.transport.notes] == ["connect", "disconnect", "connect"]
            d.say(ToPrefill("p9", GRANT))
            while isinstance(message := await hear(second), Heartbeat):
                pass
            assert message == GRANT
        await d.role.saw(PeerClosed, 2)


def that_waits(go: threading.Event, *outputs):
    """The script of a role that takes note of the end of a stream when it may, and puts these out."""

    def script(event):
        if not isinstance(event, PeerClosed):
            return []
        assert go.wait(WAIT_S)
        return outputs

    return script


async def test_a_peer_is_connected_anew_once_the_role_knows_that_its_last_stream_ended():
    """Else receives for its leases are posted on the new connection, where nothing is sent for them."""
    go = threading.Event()
    async with pair(script=that_waits(go)) as (_, d), opened(d) as first:
        assert isinstance(await hear(first), Hello)
        async with opened(d) as second:
            assert await end_of(first) == "a new stream of the peer took its place"
            hello = asyncio.create_task(hear(second))
            await asyncio.wait([hello], timeout=0.05)
            assert [n for n, _ in d.transport.notes] == ["connect", "disconnect"]
            go.set()
            assert (await hello).error is None
        await d.role.saw(PeerClosed, 2)


async def test_the_loss_of_a_stream_does_not_end_the_next_one_of_its_peer():
    """A network that breaks may be noticed by the stream first, and by the transport when the peer is there again."""
    go, may_connect = threading.Event(), threading.Event()
    late = ClosePeer("p9", "its transport is gone"), ToPrefill("p9", Credit(1, 1))
    async with pair(script=that_waits(go, *late)) as (_, d), opened(d) as first:
        await hear(first)
        connect = d.transport.connect
        d.transport.connect = lambda *peer: connect(*peer) if may_connect.wait(WAIT_S) else None
        async with opened(d) as second:
            await end_of(first)
            go.set()
            for _ in range(2):  # in the turn that hears of the end, and in the one after it
                await asyncio.wrap_future(d.loop.run_engine_call(lambda: None))
            may_connect.set()
            assert isinstance(await hear(second), Hello)
            await d.role.saw(PeerOpened, 2)
            d.say(ToPrefill("p9", GRANT))
            while isinstance(message := await hear(second), Heartbeat):
                pass
            assert message == GRANT


async def test_a_peer_is_refused_if_the_role_does_not_take_note_in_time(monkeypatch):
    monkeypatch.setattr(handoffs, "CONNECT_S", 0.01)
    go = threading.Event()
    async with pair(script=that_waits(go)) as (_, d), opened(d) as first, opened(d) as second:
        await end_of(first)
        assert "has not taken note" in (await hear(second)).error.message
        go.set()


HELLO = Hello("p9", "prefill-9", LAYOUT, (TransportEndpoint(0, "memory", b"there"),), "d1", 4)


@asynccontextmanager
async def opened(node: Running, hello: Hello | None = HELLO):
    """A prefill node's end of a stream, by hand."""
    call = node_pb2_grpc.DecodeNodeStub(node.channel).Handoff()
    if hello:
        await call.write(wire.write_prefill_message(hello))
    yield call
    call.cancel()


async def hear(call):
    async with asyncio.timeout(WAIT_S):
        return wire.read_decode_message(await call.read())


async def end_of(call) -> str:
    """The text with which the node ended the stream."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        except grpc.aio.AioRpcError as error:
            return str(error.details())
    return ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"protocol_version": 9}, f"protocol version 9 of prefill-9 != {PROTOCOL_VERSION}"),
        ({"endpoints": ()}, "transport memory of rank 0 is not offered by prefill-9 (none)"),
        ({"target_incarnation": "d0"}, "this is incarnation d1, not d0"),
    ],
)
async def test_a_peer_that_does_not_fit_is_answered_with_the_error(change, text):
    async with pair() as (_, d), opened(d, dataclasses.replace(HELLO, **change)) as call:
        answer = await hear(call)
        assert answer.error.message == text
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert d.role.events == []


async def test_a_stream_opens_with_hello_and_has_but_one():
    async with pair() as (_, d):
        async with opened(d, None) as call:
            await call.write(wire.write_prefill_message(Heartbeat()))
            assert await end_of(call) == "a handoff stream opens with Hello"
        async with opened(d) as call:
            await call.write(wire.write_prefill_message(HELLO))
            assert await end_of(call) == "malformed message: a second Hello"


async def test_a_silent_peer_is_given_up():
    def serve(server, sessions, parts, ours):
        handoffs = HandoffServer(dataclasses.replace(ours, silence_s=0.2))
        node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeNode(sessions, handoffs), server)
        return [handoffs]

    async with pair(decode=RoleSide(DECODE_SIDE.service, serve)) as (_, d), opened(d) as call:
        await hear(call)
        await call.write(wire.write_prefill_message(Heartbeat()))
        assert (await closed(d)).reason == "silent for 0.2 s"


async def test_heartbeats_keep_a_quiet_stream_alive():
    async with pair(prefill=with_links(silence_s=1.0)) as (p, d):
        p.say(ToDecode(target(d), reserve()))
        await p.role.saw(PeerOpened)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await p.role.saw(PeerClosed)
        assert not [e for e in d.role.events if isinstance(e, PeerClosed)]
