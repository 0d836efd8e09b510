"""Nodes that an operator, a file or DNS brings and takes away, with requests on them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from baton.address import HostPort
from baton.errors import InternalError
from baton.messages import Load, Prefill
from baton.node_info import NodeRole
from router.nodes.report import num_nodes_by_state, report_nodes
from router.placement.circuit_breakers import MAX_FAILURES
from router.server import RouterServer
from router.settings import RouterSettings
from router.startup import StartError
from tests.router.conftest import ANY_PORT, Router, says
from tests.router.fake_node import LAYOUT, Answer, FakeCluster, FakeNode
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

KEY = "operator"
HEADERS = {"authorization": f"Bearer {KEY}"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = (*tiny_tokenizer().encode(TEXT, False), IM_END)


class Operator:
    """A router with an admin API, and its nodes."""

    def __init__(self, nodes: FakeCluster, router: Router, client: httpx.AsyncClient) -> None:
        self.nodes, self.router, self.client = nodes, router, client

    async def post(self, role: str, node: FakeNode) -> httpx.Response:
        return await self.client.post("/admin/nodes", json={"role": role, "address": node.info.address})

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**CHAT, **more})

    async def states(self) -> dict[str, str]:
        shown = (await self.client.get("/admin/nodes")).json()["nodes"]
        return {node["address"]: node["state"] for node in shown}

    async def gone(self, node: FakeNode) -> None:
        await self.router.until(lambda: self.router.server.cluster.find(node.info.address) is None)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    """With two decode nodes, which it has from its flags."""
    nodes = FakeCluster(says(TEXT))
    await nodes.add(NodeRole.DECODE)
    await nodes.add(NodeRole.DECODE)
    router = Router(nodes, admin_api_key=(SecretStr(KEY),))
    await router.start()
    await router.ready()
    await router.until(lambda: not router.problems())
    async with httpx.AsyncClient(base_url=router.http, headers=HEADERS, timeout=20) as client:
        yield Operator(nodes, router, client)
    await router.stop()
    await nodes.close()


async def running(operator: Operator, hold: asyncio.Event) -> tuple[asyncio.Task[httpx.Response], FakeNode]:
    """A request that has some tokens and waits for `hold`, and its node. Its next attempt waits for nothing."""

    def script(prefill: Prefill) -> Answer:
        return Answer(tokens=(TOKENS,), hold=None if prefill.attempt_id.attempt else hold, hold_at=3)

    operator.nodes.script = script
    task = asyncio.create_task(operator.chat())
    await operator.nodes.until(lambda: operator.nodes.prefills)
    node = operator.nodes.node(operator.nodes.prefills[-1].target_incarnation)
    await operator.nodes.until(lambda: node.num_sent_tokens == 3)
    return task, node


def check(response: httpx.Response, attempts: int) -> None:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == TEXT
    assert response.json()["timings"]["attempts"] == attempts


async def test_an_added_node_is_used_and_listed(operator: Operator) -> None:
    new = await operator.nodes.add(NodeRole.PREFILL)
    added = await operator.post("prefill", new)
    assert (added.status_code, added.json()["state"], added.json()["sources"]) == (200, "connecting", ["admin"])
    await operator.router.ready()
    assert operator.router.server.cluster.readiness().status == "ready"
    check(await operator.chat(), attempts=1)
    assert operator.nodes.prefills[-1].target_incarnation == new.info.incarnation
    (shown,) = [n for n in (await operator.client.get("/admin/nodes")).json()["nodes"] if n["role"] == "prefill"]
    assert (shown["state"], shown["node_id"], shown["model"]) == ("up", new.info.node_id, "tiny")
    assert (await operator.post("prefill", new)).json()["state"] == "up", "it is there already"
    assert new.num_sessions == 1


def _has_prompts(nodes: FakeCluster, number: int) -> bool:
    return len(nodes.prefills) == number


async def test_a_removed_nodes_requests_go_on_elsewhere(operator: Operator) -> None:
    task, node = await running(operator, asyncio.Event())
    removed = await operator.client.delete(f"/admin/nodes/{node.info.address}")
    assert (removed.status_code, removed.json()["sources"]) == (200, [])
    assert removed.json()["problem"] == "is removed, and what it has goes on elsewhere"
    check(await task, attempts=2)
    await operator.gone(node)
    assert node.info.address not in await operator.states()
    assert (await operator.client.delete(f"/admin/nodes/{node.info.address}")).status_code == 404
    assert (await operator.post("decode", node)).status_code == 200
    await operator.router.until(lambda: num_nodes_by_state(operator.router.server.cluster)["decode", "up"] == 2)
    assert node.num_sessions == 2


async def test_a_node_that_is_removed_again_and_again_loses_no_request(operator: Operator) -> None:
    task, node = await running(operator, asyncio.Event())
    cluster = operator.router.server.cluster
    while link := cluster.find(node.info.address):
        cluster.remove(link)
        await asyncio.sleep(0)  # a turn of the loop: the link is told again at each step of its end
    check(await task, attempts=2)


async def test_removed_nodes_are_no_requests_fault(operator: Operator) -> None:
    """A request that loses two nodes is held to be the cause of it, but not of this."""
    await operator.nodes.add(NodeRole.DECODE)
    await operator.post("decode", operator.nodes.nodes[2])
    await operator.router.until(lambda: num_nodes_by_state(operator.router.server.cluster)["decode", "up"] == 3)
    hold = asyncio.Event()
    operator.nodes.script = lambda prefill: Answer(tokens=(TOKENS,), hold=hold, hold_at=3)
    task = asyncio.create_task(operator.chat())
    for number in (1, 2):
        await operator.nodes.until(partial(_has_prompts, operator.nodes, number))
        node = operator.nodes.node(operator.nodes.prefills[-1].target_incarnation)
        await operator.client.delete(f"/admin/nodes/{node.info.address}")
    hold.set()
    check(await task, attempts=3)


async def test_a_drained_node_finishes_what_it_has_and_gets_nothing_new(operator: Operator) -> None:
    hold = asyncio.Event()
    task, node = await running(operator, hold)
    drained = await operator.client.post(f"/admin/nodes/{node.info.node_id}/drain")
    assert drained.json()["state"] == "draining"
    assert drained.json()["problem"] == "is drained, and finishes what it has"
    operator.nodes.script = says(TEXT)
    for _ in range(3):
        check(await operator.chat(), attempts=1)
        assert operator.nodes.prefills[-1].target_incarnation != node.info.incarnation
    assert (await operator.states())[node.info.address] == "draining"
    node.load = Load(num_running=1)
    known = operator.router.server.core.pool.get(node.info.incarnation)
    assert known is not None
    await operator.router.until(lambda: known.load == node.load)
    hold.set()
    check(await task, attempts=1)
    await operator.gone(node)
    await operator.router.until(lambda: not node.sessions)


@pytest.mark.parametrize(("method", "then"), [("DELETE", ""), ("POST", "/drain")])
async def test_an_id_of_several_nodes_names_none_of_them(operator: Operator, method: str, then: str) -> None:
    """As nodes have that run on several machines with the same flags: it would be any of them."""
    first, second = operator.nodes.nodes
    twin = await operator.nodes.add(NodeRole.DECODE, node_id=first.info.node_id)
    await operator.post("decode", twin)
    await operator.router.until(lambda: num_nodes_by_state(operator.router.server.cluster)["decode", "up"] == 3)
    refused = await operator.client.request(method, f"/admin/nodes/{first.info.node_id}{then}")
    both = f"{first.info.address}, {twin.info.address}"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "node")
    assert refused.json()["error"]["message"].endswith(f"Name one by its address: {both}")
    assert set((await operator.states()).values()) == {"up"}
    for name, node in ((twin.info.address, twin), (second.info.node_id, second)):
        assert (await operator.client.request(method, f"/admin/nodes/{name}{then}")).status_code == 200
        await operator.gone(node)


@pytest.mark.parametrize("how", ["drain", "remove"])
async def test_a_node_of_two_addresses_is_not_used_at_the_other_one_instead(operator: Operator, how: str) -> None:
    node, cluster = operator.nodes.nodes[0], operator.router.server.cluster
    second = node.info.address.replace("127.0.0.1", "localhost")
    await operator.client.post("/admin/nodes", json={"role": "decode", "address": second})
    link = cluster.find(second)
    await operator.router.until(lambda: link.problem == "is configured twice, under different addresses")
    name = node.info.node_id
    if how == "drain":
        await operator.client.post(f"/admin/nodes/{name}/drain")
    else:
        await operator.client.delete(f"/admin/nodes/{name}")
    await operator.gone(node)
    await operator.router.until(lambda: cluster.find(second) is None)
    assert node.num_sessions == 1


async def test_a_node_is_removed_at_once_by_the_address_at_which_it_is_not_in_use(operator: Operator) -> None:
    task, node = await running(operator, asyncio.Event())
    second = node.info.address.replace("127.0.0.1", "localhost")
    await operator.client.post("/admin/nodes", json={"role": "decode", "address": second})
    link = operator.router.server.cluster.find(second)
    await operator.router.until(lambda: link.problem == "is configured twice, under different addresses")
    await operator.client.delete(f"/admin/nodes/{second}")
    check(await task, attempts=2)
    await operator.gone(node)


async def test_an_address_in_the_wrong_role_is_removed_without_the_node(operator: Operator) -> None:
    node, cluster = operator.nodes.nodes[0], operator.router.server.cluster
    wrong = node.info.address.replace("127.0.0.1", "localhost")
    await operator.client.post("/admin/nodes", json={"role": "prefill", "address": wrong})
    link = cluster.find(wrong)
    await operator.router.until(lambda: link.problem == "is a decode node, but wanted as a prefill node")
    await operator.client.delete(f"/admin/nodes/{wrong}")
    await operator.router.until(lambda: cluster.find(wrong) is None)
    assert (await operator.states())[node.info.address] == "up"
    assert node.num_sessions == 1


async def test_a_drain_is_taken_back_by_adding_the_node(operator: Operator) -> None:
    hold = asyncio.Event()
    task, node = await running(operator, hold)
    await operator.client.post(f"/admin/nodes/{node.info.address}/drain")
    assert (await operator.post("decode", node)).json()["state"] == "up"
    hold.set()
    check(await task, attempts=1)
    assert node.num_sessions == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "decode"}, "address"),
        ({"role": "decode", "address": "nowhere"}, "address"),
        ({"role": "both", "address": "a:1"}, "role"),
    ],
)
async def test_a_wrong_node_is_a_400_that_names_the_field(operator: Operator, body: dict[str, str], param: str) -> None:
    response = await operator.client.post("/admin/nodes", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_node_in_the_other_role_is_a_400(operator: Operator) -> None:
    response = await operator.post("prefill", operator.nodes.nodes[0])
    assert response.status_code == 400
    assert "is a decode node already" in response.json()["error"]["message"]


async def test_the_key_is_of_the_admin_api_alone(operator: Operator) -> None:
    async with httpx.AsyncClient(base_url=operator.router.http) as other:
        for header in ({}, {"authorization": "Bearer other"}):
            for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/x"), ("POST", "/x/drain")):
                response = await other.request(method, f"/admin/nodes{path}", headers=header)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"


async def test_clients_keys_do_not_open_it_and_its_own_opens_nothing_else() -> None:
    nodes = FakeCluster(says(TEXT))
    await nodes.add(NodeRole.DECODE)
    router = Router(nodes, admin_api_key=(SecretStr(KEY),), api_key=(SecretStr("client"),))
    await router.start()
    async with httpx.AsyncClient(base_url=router.http) as client:
        for key, admin, models in ((KEY, 200, 401), ("client", 401, 503)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/admin/nodes", headers=headers)).status_code == admin
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code in (models, 200 if key == "client" else models)
            assert (await client.get("/debug/nodes", headers=headers)).status_code == (401 if key == KEY else 200)
    await router.stop()
    await nodes.close()


async def test_without_a_key_there_is_no_admin_api(router: Router) -> None:
    async with httpx.AsyncClient(base_url=router.http, headers=HEADERS) as client:
        response = await client.post("/admin/nodes", json={"role": "decode", "address": "a:1"})
    assert response.status_code == 404
    assert "/admin/nodes needs --admin-api-key" in response.json()["error"]["message"]


async def test_debug_nodes_says_why_nodes_are_never_paired(nodes: FakeCluster) -> None:
    other = dataclasses.replace(LAYOUT, fingerprint="another")
    wrong = await nodes.add(NodeRole.DECODE, layout=other, version="1.2.3", metrics_address="10.0.0.1:9100")
    wrong.load = Load(1, 2, 3, 4)
    small = await nodes.add(NodeRole.DECODE, layout=dataclasses.replace(LAYOUT, block_size=4))
    router = Router(nodes)
    await router.start()
    await router.until(lambda: not router.problems())
    pool = router.server.core.pool
    await router.until(lambda: (known := pool.get(wrong.info.incarnation)) and known.load == wrong.load)
    async with httpx.AsyncClient(base_url=router.http) as client:
        shown = (await client.get("/debug/nodes")).json()
    (told,) = [node for node in shown["nodes"] if node["node_id"] == wrong.info.node_id]
    assert (told["fingerprint"], told["version"], told["sources"]) == ("another", "1.2.3", ["flags"])
    assert (told["incarnation"], told["address"]) == (wrong.info.incarnation, wrong.info.address)
    assert (told["model"], told["metrics_address"]) == ("tiny", "10.0.0.1:9100")
    assert told["load"] == {"num_waiting": 1, "num_running": 2, "num_blocks_free": 3, "num_blocks_total": 4}
    versions = {node["model_version"] for node in shown["nodes"]}
    assert len(versions) == 2
    assert all(version.startswith("tiny@") for version in versions)
    reason = f"LayoutMismatch fingerprint fingerprint != another of {wrong.info.node_id}"
    misfit = f"LayoutMismatch block_size 16 != 4 of {small.info.node_id}"
    unpaired = {pair["decode"]: (pair["prefill"], pair["reason"]) for pair in shown["unpaired"]}
    assert unpaired == {wrong.info.node_id: ("prefill-0", reason), small.info.node_id: ("prefill-0", misfit)}
    (out,) = [node for node in shown["nodes"] if node["state"] != "up"]  # `wrong` works alone
    assert (out["node_id"], out["state"]) == (small.info.node_id, "incompatible")
    assert out["metrics_address"] is None
    assert out["problem"] == f"fits none of the other role: {misfit}"
    assert shown["problems"] == []
    await router.stop()


async def test_debug_nodes_says_which_node_is_avoided_since_it_fails(nodes: FakeCluster, router: Router) -> None:
    nodes.script = lambda _: Answer(error=InternalError("CUDA error"))
    async with httpx.AsyncClient(base_url=router.http) as client:
        for _ in range(MAX_FAILURES):
            assert (await client.post("/v1/completions", json={"prompt": "hello"})).status_code == 500
        shown = (await client.get("/debug/nodes")).json()["nodes"]
    why = "is avoided for a while, since it fails: CUDA error"
    assert [(node["state"], node["problem"]) for node in shown] == [("avoided", why)] * 2  # either may be at fault


# ---- the other sources ----


async def test_a_file_and_dns_bring_nodes_and_take_them_away(tmp_path: Path) -> None:
    nodes = FakeCluster(says(TEXT))
    first, second = await nodes.add(NodeRole.DECODE), await nodes.add(NodeRole.DECODE)
    prefill = await nodes.add(NodeRole.PREFILL)
    file = tmp_path / "nodes.yaml"
    file.write_text(f"decode: ['{first.info.address}']")
    name = HostPort("127.0.0.1", prefill.host_port.port)
    router = Router(nodes, prefill=(), decode=(), prefill_dns=(name,), nodes_file=file)
    await router.start()
    await router.ready()
    fresh = tmp_path / "fresh"
    fresh.write_text(f"decode: ['{second.info.address}']")
    fresh.replace(file)
    await router.until(lambda: [str(link.address) for link in up(router)] == ports(prefill, second))
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        check(await client.post("/v1/chat/completions", json=CHAT), attempts=1)
    decode = nodes.prefills[-1].decode
    assert decode
    assert decode.incarnation == second.info.incarnation
    file.write_text("decode: [")
    await router.until(lambda: "--nodes-file" in router.server.cluster.readiness().status)
    assert router.server.cluster.readiness().ready
    await router.stop()
    await nodes.close()


def up(router: Router) -> list[Any]:
    links = router.server.cluster.links
    return sorted((link for link in links if not link.problem), key=lambda link: link.role.value, reverse=True)


def ports(*nodes: FakeNode) -> list[str]:
    return [node.info.address for node in nodes]


async def test_a_name_without_an_address_is_named_in_readiness(nodes: FakeCluster) -> None:
    router = Router(nodes, decode_dns=(HostPort("nowhere.invalid", 9000),))
    await router.start()
    await router.until(lambda: "--decode-dns nowhere.invalid:9000: " in router.server.cluster.readiness().status)
    (problem,) = report_nodes(router.server.cluster).problems
    assert problem.startswith("--decode-dns nowhere.invalid:9000: ")
    await router.until(lambda: router.server.cluster.readiness().ready)
    await router.stop()


HERE = (HostPort("a", 1),)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "--decode: at least one address is needed, without --decode-dns, --nodes-file or --admin-api-key"),
        ({"decode": HERE, "workers": 2, "admin_api_key": (SecretStr("k"),)}, "--admin-api-key: must be unset with"),
        ({"prefill_dns": HERE, "decode_dns": HERE}, "--prefill-dns, --decode-dns: a:1 is given twice"),
        ({"decode_dns": HERE * 2}, "--prefill-dns, --decode-dns: a:1 is given twice"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RouterSettings(http=ANY_PORT, grpc=ANY_PORT, **settings)


@pytest.mark.parametrize("name", ["nodes_file", "admin_api_key_file"])
def test_a_file_that_cannot_be_read_ends_the_start(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {name: tmp_path / "none", "decode": HERE}
    with pytest.raises(StartError, match=f"--{name.replace('_', '-')}: cannot read"):
        RouterServer(RouterSettings(http=ANY_PORT, grpc=ANY_PORT, **fields))


@pytest.mark.parametrize("name", ["nodes_file", "admin_api_key_file", "api_key_file", "ssl_certfile"])
def test_a_pipe_to_which_nobody_writes_ends_the_start(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fields: dict[str, Any] = {name: tmp_path / "pipe", "decode": HERE}
    with pytest.raises(StartError, match=f"--{name.replace('_', '-')}: cannot read .*: not a regular file"):
        RouterServer(RouterSettings(http=ANY_PORT, grpc=ANY_PORT, **fields))


# ---- several models ----


async def test_two_models_are_served_by_name() -> None:
    nodes = FakeCluster(says(TEXT))
    for model in ("one", "two"):
        for role in NodeRole:
            layout = dataclasses.replace(LAYOUT, fingerprint=model)
            await nodes.add(role, served_model_name=model, layout=layout)
    router = Router(nodes)
    await router.start()
    await router.ready()
    await router.until(lambda: not router.problems())
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert sorted(model["id"] for model in listed) == ["one", "two"]
        assert (await client.get("/v1/models/two")).json()["id"] == "two"
        for model in ("one", "two"):
            response = await client.post("/v1/chat/completions", json={**CHAT, "model": model})
            check(response, attempts=1)
            assert response.json()["model"] == model
            prefill = nodes.prefills[-1]
            assert prefill.decode
            for incarnation in (prefill.target_incarnation, prefill.decode.incarnation):
                assert nodes.node(incarnation).info.served_model_name == model
        unnamed = await client.post("/v1/chat/completions", json=CHAT)
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "three"})).status_code == 404
        page = (await client.get("/metrics")).text
        assert 'baton:e2e_request_latency_seconds_count{model_name="two",role="router"} 1.0' in page
    await router.stop()
    await nodes.close()
