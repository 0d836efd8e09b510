"""Clients that go away in each state of their request, in the middle of a stream or while they wait for the whole."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton.v1 import generation_pb2 as pb
from baton.wire import pack_tokens
from tests.e2e.client import Client
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.scenes import STATES, Director, Fragile, State

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", STATES)
async def test_a_client_leaves(fragile: Fragile, state: State, stream: bool) -> None:
    """The router forgets the request, though the node that holds it up hangs; the nodes do when they hear of it."""
    router = fragile.pair
    async with Client(router) as client:
        scene = await Director(fragile, router, client, stream=stream).scene(state)
        for held in {id(held): held for held in (scene.request, *scene.others)}.values():
            await held.request.leave()
        await asyncio.to_thread(router.wait_states)
        scene.thaw()
        await fragile.wait_whole()
        cancelled = router.metric("baton:request_ends_total", outcome="cancelled")
        after = await client.complete([9] * 50, max_tokens=3, ignore_eos=True)
        assert len(after.tokens[0]) == 3
        assert cancelled >= 1


async def test_a_grpc_call_is_cancelled(fragile: Fragile) -> None:
    router = fragile.pair
    async with Client(router) as client:
        prompt = pb.TokenIds(ids=pack_tokens([11] * 500))
        request = pb.GenerateRequest(prompt_tokens=prompt, max_tokens=1000, ignore_eos=True)
        call = client.generation.Generate(request, timeout=PATIENCE_S)
        received = [await call.read() for _ in range(5)]
        assert received[-1].WhichOneof("event") == "delta"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert await call.code() is grpc.StatusCode.CANCELLED
        await asyncio.to_thread(router.wait_states)


async def test_half_of_a_crowd_leaves(fragile: Fragile) -> None:
    """At all stages at once: who stays gets the right answer."""
    prompts = [[20 + i] * (25 * i + 1) for i in range(12)]
    fields = {"max_tokens": 24, "ignore_eos": True}
    async with Client(fragile.all) as client:
        before = await asyncio.gather(*(client.complete(p, cache_salt="before", **fields) for p in prompts))
        crowd = [client.begin(p, stream=bool(i % 3), cache_salt="crowd", **fields) for i, p in enumerate(prompts)]
        await crowd[1].until(1)
        for request in crowd[::2]:
            await request.leave()
        stayed = [await request.end() for request in crowd[1::2]]
        assert [answer.tokens[0] for answer in stayed] == [answer.tokens[0] for answer in before[1::2]]
