"""The HTTP API at its limits: bodies and numbers too large, too many requests, waiting, and no node to answer."""

import asyncio

import httpx

from baton.node_info import NodeRole
from tests.router.conftest import Router, says
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import CHAT, error_of


async def test_bodies_are_bounded(nodes):
    router = Router(nodes, max_body_bytes=2048)
    await router.start()
    await router.ready()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 4096})
        assert (response.status_code, error_of(response)["type"]) == (413, "invalid_request_error")

        async def pieces():
            for _ in range(40):
                yield b" " * 100

        response = await client.post("/v1/completions", content=pieces())
        assert response.status_code == 413
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    await router.stop()


async def test_too_many_requests_are_refused(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    router = Router(nodes, max_num_requests=1)
    await router.start()
    await router.ready()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await nodes.until(lambda: nodes.prefills)
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert error_of(response)["type"] == "rate_limit_error"
        hold.set()
        assert (await first).status_code == 200
    await router.stop()


async def test_queued_streams_are_kept_alive(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    router = Router(nodes, keep_alive_interval=0.05)
    await router.start()
    await router.ready()
    async with (
        httpx.AsyncClient(base_url=router.http, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        assert await anext(lines) == ""
        assert await anext(lines) == ": keep-alive"
        hold.set()
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    await router.stop()


async def test_not_ready_says_why():
    nodes = FakeCluster(says("x"))
    await nodes.add(NodeRole.PREFILL)
    decode = await nodes.add(NodeRole.DECODE)
    await decode.stop()
    router = Router(nodes)
    await router.start()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "no decode node" in error_of(response)["message"]
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    await router.stop()
    await nodes.close()


async def test_numbers_at_their_limits(client, nodes):
    body = {"prompt": [5], "seed": 2**70 + 1, "temperature": 1, "top_k": -1, "max_tokens": 127}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (nodes.prefills[0].sampling.seed, nodes.prefills[0].sampling.top_k) == (1, 0)
    for bad in ({"top_k": 2**40}, {"top_k": -2}, {"max_tokens": 2**40}, {"stop_token_ids": [2**40]}, {"n": 1000}):
        assert (await client.post("/v1/completions", json={"prompt": [5], **bad})).status_code == 400
    for text in (b'{"prompt": [5], "temperature": NaN}', b'{"prompt": [5], "temperature": 1e999}'):
        assert (await client.post("/v1/completions", content=text)).status_code == 400
    assert (await client.post("/v1/completions", json={"prompt": [5]})).status_code == 200
