"""The paths for load balancers and tools: /ping, /load, /debug/prefix_index, /tokenizer_info."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import websockets
from pydantic import SecretStr

from baton.messages import KvEvents
from baton.settings import parse
from router.nodes.report import report_prefix_index
from router.settings import RouterSettings
from tests.router.conftest import Router, says
from tests.router.fake_node import FakeCluster
from tests.router.http.test_access import bearer, running
from tests.router.http_shapes import CHAT, error_of
from tests.router.tiny_tokenizer import CHAT_TEMPLATE


async def test_ping_is_health_by_get_and_post(client: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        response = await client.request(method, "/ping")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_a_proxy_may_strip_its_prefix_or_not(nodes: FakeCluster) -> None:
    keys = (SecretStr("sk-one"),)
    async with running(nodes, root_path="/llm", api_key=keys) as (router, client):
        for prefix in ("", "/llm"):
            answer = await client.post(f"{prefix}/v1/chat/completions", json=CHAT, headers=bearer("sk-one"))
            assert answer.status_code == 200
            assert (await client.post(f"{prefix}/v1/chat/completions", json=CHAT)).status_code == 401
            assert (await client.get(f"{prefix}/health")).status_code == 200
            document = (await client.get(f"{prefix}/openapi.json", headers=bearer("sk-one"))).json()
            assert document["servers"] == [{"url": "/llm"}]
            async with websockets.connect(
                f"ws://{router.server.http_address}{prefix}/ws/chat", additional_headers=bearer("sk-one")
            ) as websocket:
                await websocket.send(json.dumps(CHAT))
                assert json.loads(await websocket.recv())["object"] == "chat.completion.chunk"
        for path in ("/llm", "/llmx/health", "/other/health"):
            assert (await client.get(path, headers=bearer("sk-one"))).status_code == 404


@pytest.mark.parametrize(("given", "prefix"), [("/llm", "/llm"), ("/a/b/", "/a/b"), ("/", "")])
def test_a_prefix_ends_without_a_slash(given: str, prefix: str) -> None:
    assert parse(RouterSettings, ("--decode", "127.0.0.1:9002", "--root-path", given)).root_path == prefix


def test_a_prefix_begins_with_a_slash(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(RouterSettings, ("--decode", "127.0.0.1:9002", "--root-path", "llm"))
    assert "--root-path: must begin with /" in capsys.readouterr().err


async def test_load_is_the_number_of_prompts_in_flight(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router
) -> None:
    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    assert (await client.get("/load")).json() == {"server_load": 0}
    answer = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b", "c"]}))
    await nodes.until(lambda: len(nodes.prefills) == 3)
    assert (await client.get("/load")).json() == {"server_load": 3}
    hold.set()
    assert (await answer).status_code == 200
    await router.idle()
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_the_prefix_index_says_what_nodes_hold(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router
) -> None:
    blocks = tuple(bytes([number]) * 32 for number in range(3))
    for node, held in zip(nodes.nodes, (blocks, blocks[:1]), strict=True):
        node.publish(KvEvents(0, held, snapshot=True))
    await router.until(lambda: [n.num_blocks for n in report_prefix_index(router.server.core).nodes] == [3, 1])
    shown = (await client.get("/debug/prefix_index")).json()
    assert shown["num_blocks"] == 3
    assert [(node["role"], node["num_blocks"]) for node in shown["nodes"]] == [("prefill", 3), ("decode", 1)]
    page = (await client.get("/metrics")).text
    for node in shown["nodes"]:
        assert f'baton:prefix_index_blocks{{node="{node["node_id"]}",role="router"}} {node["num_blocks"]}.0' in page


async def test_a_node_that_leaves_out_events_is_asked_for_all_blocks_in_a_new_session(
    nodes: FakeCluster, router: Router
) -> None:
    prefill, _ = nodes.nodes
    prefill.publish(KvEvents(0, (b"a" * 32,), snapshot=True))
    prefill.publish(KvEvents(2, (b"b" * 32,)))
    await router.until(lambda: prefill.num_sessions == 2)
    await router.ready()
    assert [node.num_blocks for node in report_prefix_index(router.server.core).nodes] == [0, 0]


async def test_the_tokenizer_is_told_only_with_the_flag(client: httpx.AsyncClient) -> None:
    response = await client.get("/tokenizer_info")
    assert response.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in error_of(response)["message"]


async def test_the_tokenizer_has_what_clients_need_to_render_chats(nodes: FakeCluster) -> None:
    async with running(nodes, enable_tokenizer_info_endpoint=True) as (_, client):
        info = (await client.get("/tokenizer_info")).json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|im_end|>")
    assert info["model_max_length"] == 128
    assert info["added_tokens_decoder"]["2"] == {
        "content": "<|im_start|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


async def test_only_ping_needs_no_key(nodes: FakeCluster) -> None:
    keys = (SecretStr("sk-one"),)
    async with running(nodes, api_key=keys, enable_tokenizer_info_endpoint=True) as (_, client):
        assert (await client.post("/ping")).status_code == 200
        for path in ("/load", "/debug/prefix_index", "/tokenizer_info", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 401, path
            assert (await client.get(path, headers=bearer("sk-one"))).status_code == 200, path
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
