"""Bytes that are no message, and messages that make no sense, over real gRPC: whose end they are, and that the node
goes on serving."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton import PROTOCOL_VERSION, wire
from baton.errors import InvalidRequest, TransferError
from baton.handoff_messages import Commit, Grant, Hello, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, End, Prefill, Sample, Update
from baton.node_info import NodeRole, TransportEndpoint
from baton.sampling import SamplingParams
from baton.v1 import common_pb2, node_pb2
from decode_node.server import DECODE_SIDE
from node.events import FromPeer, PeerClosed, ToDecode, ToPrefill
from prefill_node.server import PREFILL_SIDE
from tests.baton.test_wire_limits import mutate, seeds
from tests.node.scripted import LAYOUT, WAIT_S, Running, prefill, running, session
from tests.node.test_handoffs import HELLO, hear, opened, pair, reserve, target

WORK = AttemptId(1, "r", 0)
NAMED = {"OK", "ABORTED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
WROTE_TOO_LATE = "Internal error from Core"
"""What the client's own gRPC says of a call that had ended when it wrote; the node's status is lost then."""


async def healthy(node: Running) -> None:
    """It serves a router, and its engine's thread has turns."""
    async with session(node, epoch=77) as router:
        await router.read()
        node.say(Update(AttemptId(77, "healthy", 0), End()))
        (update,) = await router.updates()
        assert update.attempt_id.request_id == "healthy"


async def test_a_message_beyond_the_nodes_limits_ends_its_request_alone():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        await router.send(prefill(WORK, prompt_tokens=(1, 32)))  # of 32 tokens in the vocabulary
        (update,) = await router.updates()
        assert update.attempt_id == WORK
        assert isinstance(update.kind.error, InvalidRequest)
        assert await node.role.saw(Abort) == [Abort(WORK)]
        node.say(Update(AttemptId(1, "other", 0), End()))
        (other,) = await router.updates()
        assert other.attempt_id.request_id == "other"


async def test_an_abort_that_makes_no_sense_is_its_works_end():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        await router.send(Abort(WORK, (1_000_000,)))
        assert await node.role.saw(Abort) == [Abort(WORK)]
        (update,) = await router.updates()
        assert isinstance(update.kind.error, InvalidRequest)


async def test_a_malformed_message_about_anothers_work_ends_the_session():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        await router.send(prefill(AttemptId(2, "r", 0), prompt_tokens=(99,)))
        assert (await router.end())[0] == "ABORTED"
        assert not [e for e in node.role.events if isinstance(e, Abort | Prefill)]


SAMPLES = (Sample(0, (3,)),)


@pytest.mark.parametrize(
    "message",
    [
        Reserve(WORK, "d1", 2, (b"x" * 32,), 1, 5.0, 8),
        Commit(1, WORK, "d1", (1, 32), SAMPLES, SamplingParams(), 5.0),
        Commit(1, WORK, "d1", (1, 2), SAMPLES, SamplingParams(logit_bias={32: 1.0}), 5.0),
    ],
)
async def test_what_a_prefill_node_says_of_a_request_ends_that_request_alone(message):
    async with pair() as (_, d), opened(d) as call:
        await hear(call)
        await call.write(wire.write_prefill_message(message))
        refuse = await hear(call)
        assert isinstance(refuse, Refuse)
        assert refuse.attempt_id == WORK
        assert isinstance(refuse.error, InvalidRequest)
        assert [e.message for e in await d.role.saw(FromPeer)] == [Release(WORK)]
        d.say(ToPrefill("p9", Grant(WORK, 1, 0, 1, 1)))
        assert isinstance(await hear(call), Grant)


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan")])
async def test_a_commit_with_no_deadline_that_is_one_is_that_requests_failure(deadline_s):
    async with pair() as (_, d), opened(d) as call:
        await hear(call)
        message = wire.write_prefill_message(Commit(1, WORK, "d1", (1, 2), SAMPLES, SamplingParams(), 5.0))
        message.commit.deadline_s = deadline_s
        await call.write(message)
        assert isinstance((await hear(call)).error, InvalidRequest)


async def test_what_a_decode_node_says_of_a_request_ends_that_request_alone():
    async with pair() as (p, d):
        p.say(ToDecode(target(d), reserve()))
        await d.role.saw(FromPeer)
        d.say(ToPrefill("p1", Grant(WORK, 2**39, 0, 1, 1)), ToPrefill("p1", Grant(WORK, 3, 0, 1, 1)))
        refuse, grant = [e.message for e in await p.role.saw(FromPeer, 2)]
        assert isinstance(refuse, Refuse)
        assert isinstance(refuse.error, TransferError)
        assert grant == Grant(WORK, 3, 0, 1, 1)


async def test_deadlines_are_capped_by_the_decode_node_too():
    async with pair(request_timeout=2.0) as (_, d), opened(d) as call:
        await hear(call)
        for message in (reserve(), Commit(1, WORK, "d1", (1, 2), SAMPLES, SamplingParams(), 1e10)):
            await call.write(wire.write_prefill_message(message))
        assert [e.message.deadline_s for e in await d.role.saw(FromPeer, 2)] == [2.0, 2.0]


@asynccontextmanager
async def decode_node(*said: bytes) -> AsyncIterator[DecodeTarget]:
    """What answers a prefill node's Hello with these bytes, whatever they are, and then waits."""

    async def handoff(_: object, context: Any) -> None:
        await context.read()
        for message in said:
            await context.write(message)
        await context.read()

    handler = grpc.stream_stream_rpc_method_handler(handoff)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.DecodeNode", {"Handoff": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield DecodeTarget(f"127.0.0.1:{port}", "d1")
    await server.stop(0)


HELLO_OF_D = Hello("d1", "decode-0", LAYOUT, (TransportEndpoint(0, "memory", b"there"),), "i1", 4)


@pytest.mark.parametrize("opens", [False, True])
async def test_bytes_that_are_no_message_end_the_stream_to_the_decode_node_that_sent_them(opens, caplog):
    hello = [wire.write_decode_message(HELLO_OF_D).SerializeToString()] if opens else []
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as p, decode_node(*hello, b"\xff") as d:
        p.say(ToDecode(d, reserve()))
        (closed,) = await p.role.saw(PeerClosed)
        assert closed.reason == f"{'malformed message:' if opens else 'InvalidRequest'} its bytes are no message"
        await healthy(p)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def talk(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> str:
    """The status of a call that says these bytes, and then no more."""
    stream: Any = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
    call = stream()
    async with asyncio.timeout(WAIT_S):
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        late = await call.details() == WROTE_TOO_LATE
        return "ABORTED" if late else (await call.code()).name


@pytest.mark.parametrize("role", list(NodeRole))
async def test_bytes_that_are_no_messages_trouble_nobody(role):
    side, name = (PREFILL_SIDE, "PrefillNode") if role is NodeRole.PREFILL else (DECODE_SIDE, "DecodeNode")
    draw, whole = random.Random(1), seeds()
    methods = [f"/baton.v1.{name}/Session", *(["/baton.v1.DecodeNode/Handoff"] if name == "DecodeNode" else [])]
    subscribe = node_pb2.RouterMessage(
        subscribe={"protocol_version": PROTOCOL_VERSION, "router_epoch": 1, "target_incarnation": "i1"}
    ).SerializeToString()
    hello = wire.write_prefill_message(HELLO).SerializeToString()
    async with running(side, role) as node:
        for _ in range(60):
            method = draw.choice(methods)
            first = [subscribe if method.endswith("Session") else hello] if draw.random() < 0.7 else []
            said = [mutate(draw, draw.choice(whole)) for _ in range(draw.randint(1, 8))]
            assert await talk(node.channel, method, [*first, *said]) in NAMED
        describe: Any = node.channel.unary_unary("/baton.v1.NodeStatus/Describe")  # type: ignore[call-arg]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await describe(b"\xff\xff\xff", timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        tokenizer: Any = node.channel.unary_stream("/baton.v1.NodeStatus/GetTokenizer")  # type: ignore[call-arg]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokenizer(b"\xff\xff\xff", timeout=WAIT_S).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        told = wire.read_node_info(common_pb2.NodeInfo.FromString(await describe(b"", timeout=WAIT_S)))
        assert told.incarnation == node.info.incarnation
        if role is NodeRole.PREFILL:
            await healthy(node)
        assert not node.node.failure.done()
