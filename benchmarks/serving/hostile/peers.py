"""What a stranger who reaches the nodes' own ports can do there: cases of `benchmarks.serving.hostile`.

The stranger knows the protocol and what nodes tell anyone, no secret. Messages are made of protobuf's own classes: what
ours would refuse to write is the point.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import statistics
import time
from typing import Any

import grpc
import grpc.aio

from baton import PROTOCOL_VERSION
from baton.address import HostPort
from baton.block_hash import chain
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from benchmarks.serving.hostile.case import Attack, case, case_with
from benchmarks.serving.hostile.clients import exchange, post
from benchmarks.serving.hostile.stranger import (
    PROMPT,
    WAIT_S,
    Stranger,
    outcome,
    own_endpoint,
    pack,
    sampling,
    stranger,
)
from benchmarks.serving.hostile.watch import get

LOOKED_AFTER_S = 5.0
WINDOWS, WINDOW_S = 4, 5.0
GENERATED = "baton:node_generation_tokens_total"
UCX_HEAD_BYTES, UCX_SUM_BYTES = 39, 16
PAIR_HEAD_BYTES = 20


# ---- sessions ----


@case
async def epoch_of_another(attack: Attack) -> str:
    """Subscribe with the router's epoch, read from /debug/kv"""
    status, page = await get(attack.metrics("decode-0"), "/debug/kv")
    epochs = {h["attempt_id"]["router_epoch"] for h in json.loads(page)["holders"]} if status == 200 else set()
    attack.begin()
    if not epochs:
        return f"/debug/kv tells none ({status})"
    async with stranger(attack, "decode-0") as one:
        ended = await outcome(one.session(int(epochs.pop())))
        await asyncio.sleep(LOOKED_AFTER_S)
    return "subscribed" if ended.startswith("<") else ended


@case
async def prefill_foreign_tokens(attack: Attack) -> str:
    """a Prefill with tokens beyond the vocabulary"""
    attack.begin()
    async with stranger(attack, "decode-0") as one:
        return await outcome(_ended(one, one.prefill("oov", prompt_tokens=pack([4_000_000_000] * 8))))


@case
async def prefill_deadline_1e10(attack: Attack) -> str:
    """a Prefill with deadline_s 1e10"""
    attack.begin()
    async with stranger(attack, "prefill-0") as one:
        return await outcome(_ended(one, one.prefill("late", 1e10, sampling=sampling(1))))


@case
async def prefill_deadline_negative(attack: Attack) -> str:
    """a Prefill with deadline_s -1"""
    attack.begin()
    async with stranger(attack, "prefill-0") as one:
        return await outcome(_ended(one, one.prefill("late", -1.0, sampling=sampling(1))))


async def _ended(one: Stranger, message: node_pb2.RouterMessage) -> str:
    """How the request ends."""
    call = await one.session()
    await call.write(message)
    while True:
        for update in (await one.next_of(call, "updates")).updates.updates:
            if update.HasField("end"):
                return _error(update.end.error) if update.end.HasField("error") else "ended well"


def _error(error: common_pb2.Error) -> str:
    return f"{common_pb2.ErrorCode.Name(error.code).removeprefix('ERROR_CODE_')} {error.message[:60]}"


# ---- handoffs to a decode node ----


@case
async def hello_garbage_ucx(attack: Attack) -> str:
    """Hello with a UCX address of the right checksum and garbage inside"""
    with own_endpoint("ucx") as real:
        head, garbage = real.address[: UCX_HEAD_BYTES - UCX_SUM_BYTES], secrets.token_bytes(200)
        checksum = hashlib.sha256(head[4:] + garbage).digest()[:UCX_SUM_BYTES]
        endpoint = common_pb2.TransportEndpoint(transport=real.transport, address=head + checksum + garbage)
    async with stranger(attack, "decode-0") as one:
        attack.begin()
        return await _hello(one, endpoint)


@case_with("--transport=ipc")
async def hello_bad_host_ipc(attack: Attack) -> str:
    """Hello over ipc with a host that is no address"""
    with own_endpoint("ipc") as real:
        fields = json.loads(real.address[PAIR_HEAD_BYTES:])
        data = json.dumps({**fields, "id": "f" * 32, "hosts": ["nonsense, no address"]}).encode()
        address = real.address[:4] + hashlib.sha256(data).digest()[:16] + data
    async with stranger(attack, "decode-0") as one:
        attack.begin()
        return await _hello(one, common_pb2.TransportEndpoint(transport=real.transport, address=address))


async def _hello(one: Stranger, endpoint: common_pb2.TransportEndpoint) -> str:
    async def meet() -> str:
        _, answer = await one.handoff([endpoint])
        return _error(answer.hello.error) if answer.hello.HasField("error") else "welcomed"

    return await outcome(meet())


@case
async def commit_foreign_tokens(attack: Attack) -> str:
    """Commit with tokens beyond the vocabulary"""
    return await _commit(attack, output=4_000_000_000)


@case
async def commit_foreign_bias(attack: Attack) -> str:
    """Commit with a logit_bias beyond the vocabulary: a neighbour's answer"""
    alone = await _answer_of(attack)
    neighbours: list[str] = []

    async def meanwhile() -> None:
        neighbours.extend([await _answer_of(attack) for _ in range(3)])

    beyond = {attack.vocab_size + 40: 100.0}
    result = await _commit(attack, bias=beyond, max_tokens=1500, meanwhile=meanwhile)
    lost = sum(answer.startswith("none") for answer in neighbours)
    changed = sum(answer != alone for answer in neighbours) - lost
    return f"{result}; of {len(neighbours)} neighbours' answers {changed} changed, {lost} lost"


async def _answer_of(attack: Attack) -> str:
    fields = {"prompt": "The neighbour says", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    reader, writer = await asyncio.open_connection(attack.http.host, attack.http.port)
    try:
        async with asyncio.timeout(WAIT_S):
            writer.writelines(post("/v1/completions", body))
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            return str(json.loads(await reader.readexactly(size))["choices"][0]["token_ids"])
    except (TimeoutError, OSError, LookupError, asyncio.IncompleteReadError, ValueError) as error:
        return f"none: {error!r}"
    finally:
        writer.close()


async def _commit(
    attack: Attack, output: int = 7, bias: dict[int, float] | None = None, max_tokens: int = 8, meanwhile: Any = None
) -> str:
    """Hand over a prompt of which the decode node has every block, so that none has to travel."""
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(stranger(attack, "decode-0"))
        await _ended(one, one.prefill("prime"))
        session = await one.session()
        call, hello = await one.handoff([stack.enter_context(own_endpoint("ucx"))])
        if hello.hello.HasField("error"):
            return _error(hello.hello.error)
        attempt_id, target = one.attempt_id("commit"), one.info.incarnation
        reserve = _reserve_of_prompt(one, attempt_id, max_tokens)
        await call.write(node_pb2.PrefillMessage(reserve=reserve))
        grant = await one.next_of(call, "grant", "refuse")
        if grant.WhichOneof("kind") == "refuse":
            return f"reserve refused: {_error(grant.refuse.error)}"
        attack.begin()
        commit = node_pb2.Commit(
            lease=grant.grant.lease,
            attempt_id=attempt_id,
            target_incarnation=target,
            prompt_tokens=pack(PROMPT),
            samples=[common_pb2.Sample(output_tokens=pack([output]))],
            sampling=sampling(max_tokens, logit_bias=bias or {}),
            deadline_s=60.0,
        )
        await call.write(node_pb2.PrefillMessage(commit=commit))

        async def replied() -> str:
            answer = await one.next_of(call, "commit_reply", "refuse")
            if answer.WhichOneof("kind") == "refuse":
                return f"refused: {_error(answer.refuse.error)}"
            reply = answer.commit_reply
            return _error(reply.error) if reply.HasField("error") else f"accepted, {grant.grant.num_parts} parts"

        result = await outcome(replied())
        if meanwhile is not None:
            await meanwhile()
        else:
            await asyncio.sleep(1.0)  # for a step with it
        session.cancel()
        return result


def _reserve_of_prompt(one: Stranger, attempt_id: common_pb2.AttemptId, max_tokens: int) -> node_pb2.Reserve:
    return node_pb2.Reserve(
        attempt_id=attempt_id,
        target_incarnation=one.info.incarnation,
        num_tokens=len(PROMPT),
        block_hashes=b"".join(chain(PROMPT, one.info.layout.block_size)),
        num_samples=1,
        deadline_s=60.0,
        max_total_tokens=len(PROMPT) + max_tokens,
    )


@case_with("--decode=2")
async def reserve_deadline_1e10(attack: Attack) -> str:
    """Reserve with deadline_s 1e10, at two decode nodes: one has nothing else to do"""
    return "; ".join([await _reserve(attack, 1e10, name) for name in ("decode-0", "decode-1")])


@case
async def reserve_deadline_negative(attack: Attack) -> str:
    """Reserve with deadline_s -1: is it the request that ends, or the stream?"""
    return await _reserve(attack, -1.0)


async def _reserve(attack: Attack, deadline_s: float, name: str = "decode-0") -> str:
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(stranger(attack, name))
        await one.session()
        call, hello = await one.handoff([stack.enter_context(own_endpoint("ucx"))])
        if hello.hello.HasField("error"):
            return _error(hello.hello.error)
        attempt_id = one.attempt_id("reserve")
        reserve = node_pb2.Reserve(
            attempt_id=attempt_id,
            target_incarnation=one.info.incarnation,
            num_tokens=8,
            num_samples=1,
            deadline_s=deadline_s,
            max_total_tokens=16,
        )
        attack.begin()
        await call.write(node_pb2.PrefillMessage(reserve=reserve))

        async def refusal() -> str:
            answer = await one.next_of(call, "grant", "refuse")
            if answer.WhichOneof("kind") == "refuse":
                return f"refused: {_error(answer.refuse.error)}"
            await one.next_of(call, "heartbeat")  # it lives
            return "granted"

        return await outcome(refusal())


# ---- a decode node that lies to a prefill node ----


class Liar(node_pb2_grpc.DecodeNodeServicer):
    """Grants what it is asked for, under a number of its choice."""

    def __init__(self, info: Any, endpoint: Any, lease: int) -> None:
        self._info = info
        self._endpoint = endpoint
        self._lease = lease
        self.asked = asyncio.Event()

    async def Handoff(self, _: object, context: Any) -> None:  # noqa: N802
        await context.read()
        hello = node_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation="liar",
            node_id="liar",
            layout=self._info.layout,
            endpoints=[self._endpoint],
            part_blocks=4,
        )
        await context.write(node_pb2.DecodeMessage(hello=hello))
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            if message.HasField("reserve"):
                grant = node_pb2.Grant(attempt_id=message.reserve.attempt_id, lease=self._lease, num_parts=1, credits=1)
                await context.write(node_pb2.DecodeMessage(grant=grant))
                self.asked.set()


@case
async def grant_lease_2_39(attack: Attack) -> str:
    """Grant.lease of 2^39, from a decode node that lies"""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with contextlib.AsyncExitStack() as stack:
        real = await stack.enter_async_context(stranger(attack, "decode-0"))
        one = await stack.enter_async_context(stranger(attack, "prefill-0"))
        liar = Liar(real.info, stack.enter_context(own_endpoint("ucx")), 2**39)
        node_pb2_grpc.add_DecodeNodeServicer_to_server(liar, server)  # type: ignore[no-untyped-call]
        await server.start()
        attack.begin()
        target = node_pb2.DecodeTarget(address=f"127.0.0.1:{port}", incarnation="liar")
        try:
            return await outcome(_ended(one, one.prefill("lied-to", 5.0, decode=target)))
        finally:
            await server.stop(None)


# ---- audits ----


@case
async def debug_kv_loops(attack: Attack) -> str:
    """two clients that loop over a decode node's /debug/kv"""
    address = attack.metrics("decode-0")
    statuses: list[int] = []

    async def loop() -> None:
        while True:
            statuses.append((await get(address, "/debug/kv"))[0])
            if statuses[-1] != 200:
                await asyncio.sleep(0.005)  # refusals come as fast as they are asked for

    async def rate() -> float:
        """Tokens a second that the node generates."""
        before, since = await _num_tokens(address), time.monotonic()
        await asyncio.sleep(WINDOW_S)
        return (await _num_tokens(address) - before) / (time.monotonic() - since)

    attack.begin()
    kept = []
    for _ in range(WINDOWS):
        calm = await rate()
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(loop()) for _ in range(2)]
            kept.append(await rate() / max(calm, 1e-9))
            for one in loops:
                one.cancel()
    pages = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
    return f"the node's tokens/s: {statistics.median(kept):.0%} of what they are without; pages {pages}"


async def _num_tokens(address: HostPort) -> float:
    _, page = await get(address, "/metrics")
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(GENERATED))


@case
async def garbage_at_data_port(attack: Attack) -> str:
    """HTTP at a node's gRPC port"""
    attack.begin()
    return await exchange(attack.nodes["decode-0"], [b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 4096], WAIT_S)
