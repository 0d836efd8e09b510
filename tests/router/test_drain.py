"""A router that stops: what becomes of the requests that it has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.offload.threads import INLINE_SIZE
from tests.router.conftest import Router, says
from tests.router.fake_node import PATIENCE_S
from tests.router.nodes.test_nodes import answer, text_of


async def test_draining_lets_requests_end(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello world", hold=hold)
    router = Router(nodes, drain_timeout=20)
    await router.start()
    await router.ready()
    request = asyncio.create_task(answer(router))
    await nodes.until(lambda: nodes.prefills)
    stop = asyncio.create_task(router.server.stop(asyncio.Event()))
    await router.ready(False)
    assert "shutting down" in router.server.cluster.readiness().status
    hold.set()
    assert text_of(await request) == "hello world"
    async with asyncio.timeout(10):
        await stop


@pytest.mark.parametrize(("hurries", "status"), [(False, 200), (True, 503)])
async def test_a_request_whose_body_still_comes_is_answered_by_a_router_that_stops(nodes, hurries, status):
    """Its prompt is long enough to be rendered and tokenized on threads, and nothing else runs."""
    router = Router(nodes, drain_timeout=20)
    await router.start()
    await router.ready()
    chat = {"messages": [{"role": "user", "content": "hi " * INLINE_SIZE}], "truncate_prompt_tokens": 8}
    body, address, hurry = json.dumps(chat).encode(), router.server.http_address, asyncio.Event()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        stop = asyncio.create_task(router.server.stop(hurry))
        await router.ready(False)
        if hurries:
            hurry.set()
            await router.until(lambda: router.server.dispatcher.is_closed)
        writer.write(body)
        answered = await reader.read()
        await stop
    assert answered.startswith(f"HTTP/1.1 {status} ".encode()), answered
    writer.close()


async def test_a_call_without_a_request_does_not_keep_a_router_from_its_end(nodes):
    router = Router(nodes, drain_timeout=60)
    await router.start()
    await router.ready()
    async with grpc.aio.insecure_channel(router.grpc) as channel, asyncio.timeout(PATIENCE_S):
        begin: Any = channel.stream_stream("/baton.v1.Generation/Generate", None, None)
        call = begin()
        await call.wait_for_connection()
        await generation_pb2_grpc.GenerationStub(channel).ListModels(pb.ListModelsRequest())  # behind the other one
        await router.server.stop(asyncio.Event())
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the server is stopping"


async def test_a_drain_in_a_hurry_cancels_what_runs(nodes):
    nodes.script = says("hello world", hold=asyncio.Event())
    router = Router(nodes, drain_timeout=20)
    await router.start()
    await router.ready()
    request = asyncio.create_task(answer(router))
    await nodes.until(lambda: nodes.prefills)
    async with asyncio.timeout(10):
        await router.stop()
    response = await request
    assert response.status_code == 503
    assert "the server was stopped" in response.json()["error"]["message"]
