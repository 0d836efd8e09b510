"""Nodes that come, go, hang and do not fit, in any order."""

import asyncio
import dataclasses
import time

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.address import HostPort
from baton.errors import PeerLost
from baton.messages import Load
from baton.node_info import NodeRole, TransportEndpoint
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.discovery.source import Member
from router.nodes import links
from router.nodes.report import report_nodes
from tests.router.conftest import Router, says
from tests.router.fake_node import LAYOUT, PATIENCE_S, Answer, FakeCluster
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def empty():
    cluster = FakeCluster(says("hello world"))
    yield cluster
    await cluster.close()


async def answer(router: Router, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        return await client.post("/v1/chat/completions", json={**CHAT, **more})


async def has_tokens(router: Router, least: int) -> None:
    """Wait until the router has so many tokens of the newest request."""
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client, asyncio.timeout(PATIENCE_S):
        while (await client.get("/debug/requests?limit=1")).json()["requests"][0]["num_output_tokens"] < least:
            pass


def stand_still(seconds: float) -> None:
    """What a long call without an await does to the event loop."""
    time.sleep(seconds)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def test_nodes_may_start_after_the_router(empty):
    prefill = await empty.add(NodeRole.PREFILL)
    decode = await empty.add(NodeRole.DECODE)
    await prefill.stop()
    await decode.stop()
    router = Router(empty)
    await router.start()
    await router.until(lambda: "Connection refused" in router.server.cluster.readiness().status)
    assert (await answer(router)).status_code == 503, "the model is not known yet"
    assert await _num_refused_by_every_api(router) == 6.0
    await prefill.restart()
    await decode.restart()
    await router.ready()
    assert text_of(await answer(router)) == "hello world"
    await router.stop()


async def _num_refused_by_every_api(router: Router) -> float:
    """By its metrics, once each API was asked to generate."""
    message = [{"role": "user", "content": "x"}]
    bodies = {
        "/v1/chat/completions": {"messages": message},
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": {"messages": message, "max_tokens": 1, "model": "m"},
        "/v1/responses": {"input": "x"},
    }
    channel = grpc.aio.insecure_channel(router.grpc)
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as http, channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for path, body in bodies.items():
            assert (await http.post(path, json=body)).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(generation_pb2.GenerateRequest(prompt="x")).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await http.get("/v1/models/m")).status_code == 503, "it is no request to generate"
        metrics = (await http.get("/metrics")).text
    (family,) = (f for f in text_string_to_metric_families(metrics) if f.name == "baton:request_ends")
    labels = {"model_name": "", "outcome": "failed", "reason": "node_unavailable"}
    return sum(sample.value for sample in family.samples if labels.items() <= sample.labels.items())


async def test_a_node_that_stops_sending_its_tokenizer_does_not_keep_the_others_waiting(empty, monkeypatch):
    monkeypatch.setattr(links, "DESCRIBE_TIMEOUT_S", 0.5)
    hung, well = await empty.add(NodeRole.DECODE), await empty.add(NodeRole.DECODE)
    hung.sends_tokenizer.clear()
    router = Router(empty)
    await router.start()
    await router.ready()
    assert well.tokenizer_fetches >= 1
    assert text_of(await answer(router)) == "hello world"
    hung.sends_tokenizer.set()
    await router.stop()


async def test_a_tokenizer_without_end_is_not_read_to_its_end(empty, monkeypatch):
    monkeypatch.setattr(links, "MAX_TOKENIZER_BYTES", 5000)
    node = await empty.add(NodeRole.DECODE)
    router = Router(empty)
    await router.start()
    link = router.server.cluster.find(node.info.address)
    await router.until(lambda: link.problem == "its tokenizer has more than 5000 bytes")
    await router.stop()


async def test_a_node_that_is_removed_while_it_sends_its_tokenizer_does_not_take_the_others_with_it(empty):
    hung = await empty.add(NodeRole.DECODE)
    hung.sends_tokenizer.clear()
    router = Router(empty)
    await router.start()
    cluster = router.server.cluster
    await router.until(lambda: hung.tokenizer_fetches == 1)
    well = await empty.add(NodeRole.DECODE)
    cluster.membership.add(Member(NodeRole.DECODE, HostPort.parse(well.info.address)))
    await router.until(lambda: cluster.find(well.info.address).incarnation is not None)
    link = cluster.find(hung.info.address)
    assert link is not None
    cluster.remove(link)
    await router.ready()
    assert text_of(await answer(router)) == "hello world"
    hung.sends_tokenizer.set()
    await router.stop()


async def test_a_restarted_node_is_taken_in_again(router, nodes):
    fetches = sum(node.tokenizer_fetches for node in nodes.nodes)
    assert fetches == 1
    started = time.monotonic()
    await nodes.nodes[1].restart()
    await router.ready(False)
    await router.ready()
    assert time.monotonic() - started < 5
    assert text_of(await answer(router)) == "hello world"
    assert sum(node.tokenizer_fetches for node in nodes.nodes) == fetches


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_decode_node_costs_no_token(empty, stream):
    """The answer goes on elsewhere, without a gap or a repeat."""
    await empty.add(NodeRole.PREFILL)
    first, second = await empty.add(NodeRole.DECODE), await empty.add(NodeRole.DECODE)
    router = Router(empty)
    await router.start()
    await router.ready()
    await router.until(lambda: not router.problems())
    text = "the quick brown fox jumps over the lazy dog"
    tokens = (*tiny_tokenizer().encode(text, False), IM_END)
    hold, held = asyncio.Event(), asyncio.Event()

    def script(prefill):
        if prefill.attempt_id.attempt:
            return Answer(tokens=(tokens,))
        held.set()
        return Answer(tokens=(tokens,), hold=hold, hold_at=3)

    empty.script = script
    request = asyncio.create_task(answer(router, stream=stream))
    await held.wait()
    victim = first if empty.prefills[0].decode.incarnation == first.info.incarnation else second
    await empty.until(lambda: victim.num_sent_tokens == 2)
    await has_tokens(router, 2)  # else they may be lost with the node
    killed = time.monotonic()
    await victim.stop()
    response = await request
    assert time.monotonic() - killed < 2
    if stream:
        assert '"attempts":2' in response.text
    else:
        assert text_of(response) == text
        assert response.json()["timings"]["attempts"] == 2
        assert response.json()["usage"]["completion_tokens"] == len(tokens)
    so_far = empty.prefills[1].samples[0].output_tokens
    assert 0 < len(so_far) <= 3
    assert so_far == tokens[: len(so_far)]
    await router.stop()


async def test_a_request_waits_for_a_node_and_goes_on_with_it(router, nodes):
    """The only decode node dies half-way, and another one comes: the client sees a pause."""
    nodes.script = says("hello world", hold=asyncio.Event())
    request = asyncio.create_task(answer(router))
    await nodes.until(lambda: nodes.prefills)
    nodes.script = says("hello world")
    await nodes.nodes[1].stop()
    await router.ready(False)
    waiting = asyncio.create_task(answer(router))
    assert router.server.core.num_requests_by_state()["unplaced"] == 1
    await nodes.nodes[1].restart()
    assert text_of(await request) == text_of(await waiting) == "hello world"


async def test_a_request_that_waits_in_vain_is_a_503_at_its_deadline(router, nodes):
    await nodes.nodes[1].stop()
    await router.ready(False)
    response = await answer(router, timeout=0.2)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    message = response.json()["error"]["message"]
    assert "no node could take it within 0.2 s" in message
    assert "no decode node" in message


async def test_more_requests_than_may_wait_are_a_503_at_once(nodes):
    router = Router(nodes, max_waiting=0)
    await router.start()
    await router.ready()
    await nodes.nodes[1].stop()
    await router.ready(False)
    response = await answer(router)
    assert response.status_code == 503
    assert "no decode node" in response.json()["error"]["message"]
    await router.stop()


async def test_a_node_that_stops_gets_nothing_new_and_finishes_what_it_has(empty):
    await empty.add(NodeRole.PREFILL)
    first, second = await empty.add(NodeRole.DECODE), await empty.add(NodeRole.DECODE)
    router = Router(empty)
    await router.start()
    await router.ready()
    await router.until(lambda: not router.problems())
    first.load = Load(draining=True)
    await router.until(lambda: "is stopping" in router.problems())
    for _ in range(4):
        response = await answer(router)
        assert response.json()["timings"]["attempts"] == 1
        assert response.json()["timings"]["decode_node"] == second.info.node_id
    states = {node.node_id: node.state for node in report_nodes(router.server.cluster).nodes}
    assert (states[first.info.node_id], states[second.info.node_id]) == ("stopping", "up")
    second.load = Load(draining=True)
    await router.ready(False)
    assert "no decode node" in router.server.cluster.readiness().status
    await router.stop()


async def test_without_prefill_nodes_it_is_ready_and_says_what_is_missing(router, nodes):
    await nodes.nodes[0].stop()
    await router.ready(False)
    async with httpx.AsyncClient(base_url=router.http) as client:
        ready = await client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["status"].startswith("ready, degraded: no prefill node (prefill node 127.0.0.1:")
    assert text_of(await answer(router)) == "hello world"


async def test_a_router_that_stood_still_takes_no_node_for_silent(router, nodes):
    for link in router.server.cluster.links:
        link._silence_s = 0.5
    await nodes.nodes[1].restart()
    await router.ready(False)
    await router.ready()  # by a session with that limit
    nodes.script = says("hello world", hold=asyncio.Event())
    request = asyncio.create_task(answer(router, timeout=2))
    await nodes.until(lambda: nodes.prefills)
    stand_still(2.0)
    assert (await request).status_code == 504, "its time is up, and no node was lost"
    assert len(nodes.prefills) == 1
    assert router.server.cluster.readiness().status == "ready"


async def test_a_lost_transfer_is_tried_again(router, nodes):
    def script(prefill):
        return (
            says("hello world")(prefill) if prefill.attempt_id.attempt else Answer(error=PeerLost("the endpoint broke"))
        )

    nodes.script = script
    response = await answer(router)
    assert text_of(response) == "hello world"
    assert response.json()["timings"]["attempts"] == 2
    async with httpx.AsyncClient(base_url=router.http) as client:
        metrics = (await client.get("/metrics")).text
    assert 'baton:request_attempts_total{model_name="tiny",reason="node_error",role="router"} 1.0' in metrics


async def test_a_node_that_hangs_is_lost(router, nodes):
    nodes.nodes[1].silent = True
    await router.until(lambda: "silent for 2.5 s" in router.server.cluster.readiness().status)
    assert (await answer(router, timeout=0.1)).status_code in (503, 504), "it may have subscribed again, to be silent"


@pytest.mark.parametrize(
    ("changes", "says_"),
    [
        ({"layout": dataclasses.replace(LAYOUT, block_size=32)}, "LayoutMismatch block_size 16 != 32"),
        ({"served_model_name": "other"}, "served_model_name tiny of prefill-0 != other of decode-1"),
        ({"layout": dataclasses.replace(LAYOUT, fingerprint="x")}, "LayoutMismatch fingerprint fingerprint != x"),
        ({"endpoints": (TransportEndpoint(0, "ipc", b""),)}, "transport ucx of prefill-0 != ipc of decode-1"),
        ({"tokenizer_digest": "0" * 64}, "tokenizer"),
    ],
)
async def test_a_node_that_does_not_fit_is_named(empty, changes, says_):
    await empty.add(NodeRole.PREFILL, endpoints=(TransportEndpoint(0, "ucx", b""),))
    await empty.add(NodeRole.DECODE, **{"endpoints": (TransportEndpoint(0, "ucx", b""),), **changes})
    router = Router(empty)
    await router.start()
    await router.until(lambda: says_ in router.server.cluster.readiness().status)
    # if it is ready, a decode node came first, and a prefill node does not fit
    waits = not router.server.cluster.readiness().ready
    response = await answer(router, timeout=0.2 if waits else 20)
    ambiguous = "served_model_name" in changes
    assert response.status_code == (400 if ambiguous else 503 if waits else 200)
    await router.stop()


async def test_nodes_in_each_others_place_are_named(empty):
    prefill, decode = await empty.add(NodeRole.PREFILL), await empty.add(NodeRole.DECODE)
    router = Router(empty, prefill=(decode.host_port,), decode=(prefill.host_port,))
    await router.start()
    await router.until(lambda: "is a prefill node, but wanted as a decode node" in router.problems())
    await router.until(lambda: "is a decode node, but wanted as a prefill node" in router.problems())
    await router.stop()


async def test_one_node_under_two_names_is_used_once(empty):
    await empty.add(NodeRole.PREFILL)
    decode = await empty.add(NodeRole.DECODE)
    twice = (decode.host_port, dataclasses.replace(decode.host_port, host="localhost"))
    router = Router(empty, decode=twice)
    await router.start()
    await router.ready()
    await router.until(lambda: router.problems() == "is configured twice, under different addresses")
    assert decode.num_sessions == 1
    assert text_of(await answer(router)) == "hello world"
    await router.stop()


async def test_the_shortest_context_counts(empty):
    await empty.add(NodeRole.PREFILL)
    await empty.add(NodeRole.DECODE, max_model_len=64)
    router = Router(empty)
    await router.start()
    await router.ready()
    response = await answer(router, max_tokens=100)
    assert "context length is 64 tokens" in response.json()["error"]["message"]
    await router.stop()
