"""The paths for load balancers and tools: /ping, /load, /tokenizer_info."""

from __future__ import annotations

import asyncio

import httpx
from pydantic import SecretStr

from tests.router.conftest import Router, says
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import CHAT, error_of
from tests.router.test_access import bearer, running
from tests.router.tiny_tokenizer import CHAT_TEMPLATE


async def test_ping_is_health_by_get_and_post(client: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        response = await client.request(method, "/ping")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


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
        for path in ("/load", "/tokenizer_info", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 401, path
            assert (await client.get(path, headers=bearer("sk-one"))).status_code == 200, path
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
