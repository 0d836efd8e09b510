"""What strangers may say to a node's gRPC services: first messages and later ones, wrong in some places or no messages.

A real node shell around a scripted role. Each stream ends with a named status or goes on; the node lives, its accounts
agree, and whoever comes next is served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message

from baton import wire
from baton.handoff_messages import Commit, Hello, Release, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, Migrate, Prefill, Sample, Subscribe
from baton.node_info import NodeRole, TransportEndpoint
from baton.sampling import SamplingParams
from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.server import DECODE_SIDE
from node.events import FromPeer
from prefill_node.server import PREFILL_SIDE
from tests.fuzz.mutations import wrong_wire
from tests.fuzz.served import CASE_S, SHARES, no_mistakes, some_at_once
from tests.node.scripted import LAYOUT, RouterStream, Running, running

NUM_STREAMS = 400
NUM_QUESTIONS = 100
OURS = frozenset((grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE))
WRITE_AFTER_END = "Internal error from Core"
"""What the client's grpc.aio says of a write that meets the end of its stream, instead of what the node has said."""
SAMPLING = SamplingParams(
    max_tokens=4,
    logit_bias={7: 1.0},
    stop_token_ids=frozenset((3,)),
    allowed_token_ids=frozenset((5, 7)),
    bad_words_token_ids=((7, 5),),
)


def routers(epoch: int) -> list[wire.RouterToNode]:
    """What a router says; the first opens the session."""
    attempt_id = AttemptId(epoch, "r", 0)
    return [
        Subscribe(epoch, "i1"),
        Prefill(attempt_id, "i1", (1, 2, 3), (Sample(0),), SAMPLING, 5.0),
        Abort(attempt_id),
        Abort(attempt_id, (0,)),
        Migrate(attempt_id, 1, DecodeTarget("127.0.0.1:1", "i2")),
    ]


def prefill_nodes(number: int) -> list[Any]:
    """What a prefill node says; the first opens the stream."""
    attempt_id = AttemptId(1, "r", 0)
    endpoints = (TransportEndpoint(0, "memory", b"there"),)
    return [
        Hello(f"p{number}", "p", LAYOUT, endpoints, target_incarnation="i1", part_blocks=4),
        Reserve(attempt_id, "i1", 20, (b"h" * 32,), 1, 5.0, 24),
        Reserve(attempt_id, "i1", 20, (b"h" * 32,), 1, 5.0, 24, move=1, num_spare_tokens=3),
        Commit(1, attempt_id, "i1", (1, 2, 3), (Sample(0, (4,)),), SAMPLING, 5.0),
        Release(attempt_id),
    ]


def wires(number: int, method: str) -> list[Message]:
    if method == "Handoff":
        return [wire.write_prefill_message(message) for message in prefill_nodes(number)]
    said = [wire.write_router_message(message) for message in routers(number + 2)]
    return [*said, wire.join_router_messages(said[-2:])]


@SHARES
@pytest.mark.parametrize(
    ("service", "method"), [("PrefillNode", "Session"), ("DecodeNode", "Session"), ("DecodeNode", "Handoff")]
)
async def test_streams(share: int, service: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    codes, wrong = Counter[str](), dict[str, str]()
    side, role = (PREFILL_SIDE, NodeRole.PREFILL) if service == "PrefillNode" else (DECODE_SIDE, NodeRole.DECODE)
    async with running(side, role) as node:
        open_stream: Any = node.channel.stream_stream(f"/baton.v1.{service}/{method}")  # type: ignore[call-arg]

        async def one(number: int) -> None:
            sent = _stream(Random(f"{service} {method} {number}"), wires(number, method))
            async with asyncio.timeout(CASE_S):
                code, details = await _told(open_stream(), sent)
            codes[code.name] += 1
            if code in OURS and details != WRITE_AFTER_END:
                wrong.setdefault(f"{code.name} {details[:60]}", f"case {number}: {details} {sent!r}"[:400])

        await some_at_once(one, NUM_STREAMS // share)
        assert not node.node.failure.done()
        got_through = [e for e in node.role.events if isinstance(e, FromPeer | Prefill | Abort | Migrate)]
        assert got_through, "nothing got through"
        await _is_well(node, role)
    assert not wrong, "\n".join(wrong.values())
    assert codes["INVALID_ARGUMENT"] > 20, codes
    no_mistakes(caplog)


@pytest.mark.parametrize("method", ["Describe", "GetTokenizer", "AuditKv"])
async def test_questions(method: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong = dict[str, str]()
    async with running(DECODE_SIDE, NodeRole.DECODE) as node:
        ask: Any = node.channel.unary_stream(f"/baton.v1.NodeStatus/{method}")  # type: ignore[call-arg]

        async def one(number: int) -> None:
            sent = wrong_wire(Random(f"{method} {number}"), node_pb2.GetTokenizerRequest(digest="d1"))
            call = ask(sent, timeout=CASE_S)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            if (code := await call.code()) in OURS:
                wrong.setdefault(code.name, f"case {number}: {await call.details()} {sent!r}")

        await some_at_once(one, NUM_QUESTIONS)
        await _is_well(node, NodeRole.DECODE)
    assert not wrong, "\n".join(wrong.values())
    no_mistakes(caplog)


def _stream(random: Random, messages: list[Message]) -> list[bytes]:
    """Opens wrong, or opens right and goes on wrong."""
    first, *later = messages
    if random.random() < 0.4:
        return [wrong_wire(random, first), random.choice(later).SerializeToString()]
    ends = [wrong_wire(random, random.choice(later)) for _ in range(random.choice((1, 1, 3)))]
    return [first.SerializeToString(), *ends]


async def _told(call: Any, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """How the stream ends, of which no more is said after `sent`."""
    try:
        for message in sent:
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return await call.code(), await call.details()


async def _is_well(node: Running, role: NodeRole) -> None:
    stub = node_pb2_grpc.PrefillNodeStub if role is NodeRole.PREFILL else node_pb2_grpc.DecodeNodeStub
    async with RouterStream(stub(node.channel), Subscribe(1, "i1")) as router:
        await router.read()  # Subscribed
        await router.send(Abort(AttemptId(1, "the last", 0)))
        await _heard(node, "the last")
    async with httpx.AsyncClient(timeout=CASE_S) as client:
        page = await client.get(f"http://{node.node.metrics.address}/integrity")
        assert page.status_code == 200, page.text


async def _heard(node: Running, request_id: str) -> None:
    count = 0
    while not any(abort.attempt_id.request_id == request_id for abort in await node.role.saw(Abort, count)):
        count = len([e for e in node.role.events if isinstance(e, Abort)]) + 1
