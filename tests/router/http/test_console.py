"""The console: its snapshot, its files, who may see what."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from baton.telemetry import RouterMetrics
from router.http.console.page import files
from router.http.console.snapshot import Snapshot, _order
from router.http.console.work import add_up, histogram_of, sums_of
from router.requests.kv_flows import KvFlow, KvFlows
from router.workers.siblings import Siblings, WorkerPlace
from tests.router.conftest import Router, on_shared_loop, says
from tests.router.fake_node import FakeCluster
from tests.router.http.test_access import bearer, running

COMPLETION = {"prompt": "a", "max_tokens": 4}


async def snapshot_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/debug/console")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def test_a_snapshot_has_nodes_work_and_flows(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router
) -> None:
    nodes.script = says("hello")
    before = await snapshot_of(client)
    assert (before["work"]["flows"], before["work"]["first_token_s"]["counts"]) == ([], [])
    for _ in range(2):
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    await router.idle()
    shown = await snapshot_of(client)
    work = shown["work"]
    prefill, decode = shown["nodes"]
    assert (prefill["role"], decode["role"], shown["models"]) == ("prefill", "decode", ["tiny"])
    assert (shown["is_ready"], shown["has_admin"], shown["bottleneck"]) == (True, False, "none")
    assert decode["num_seats"] == nodes.nodes[1].info.max_num_seqs
    (flow,) = work["flows"]
    assert (flow["source"], flow["target"]) == (prefill["incarnation"], decode["incarnation"])
    assert (flow["num_handoffs"], flow["num_bytes"]) == (2, 2 * nodes_bytes(await timeline(client)))
    assert work["num_ended"] == {"finished": 2}
    computed, generated = (work["num_tokens_by_node"][node["incarnation"]] for node in (prefill, decode))
    assert computed + generated == work["num_prompt_tokens"] + work["num_generation_tokens"]
    assert computed >= work["num_prompt_tokens"]
    assert (sum(work["first_token_s"]["counts"]), work["num_prompt_tokens"] > 0) == (2, True)
    assert len(work["inter_token_s"]["counts"]) == len(work["inter_token_s"]["bounds"]) + 1
    assert set(work["requests"].values()) == {0}


def test_nodes_are_in_the_order_of_their_numbers_whatever_they_are_called() -> None:
    names = ["node-10", "node-9", "1²3", "²", "٣", "7" * 5000]
    found = sorted(({"role": "decode", "node_id": name, "address": "a:1"} for name in names), key=_order)
    assert [node["node_id"] for node in found if node["node_id"].startswith("node-")] == ["node-9", "node-10"]
    assert len(found) == len(names)


async def timeline(client: httpx.AsyncClient) -> dict[str, Any]:
    (newest,) = (await client.get("/debug/requests?limit=1")).json()["requests"]
    (found,) = (await client.get(f"/debug/requests/{newest['request_id']}")).json()["requests"]
    return dict(found)


def nodes_bytes(timeline: dict[str, Any]) -> int:
    return int(timeline["attempts"][0]["adopted"]["transfer_bytes"])


@on_shared_loop
async def test_the_page_and_its_files_come_from_the_router_alone(shared_client: httpx.AsyncClient) -> None:
    page = await shared_client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = set(re.findall(r'(?:href|src)="console/([^"]+)"', page.text))
    assert {"main.js", "style.css", "icon.svg"} <= named
    for name in files():
        answer = await shared_client.get(f"/console/{name}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'self'", "frame-ancestors 'none'", "form-action 'none'"} <= set(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        outside = re.findall(r"(?<![\w:])(?:https?:)?//[\w.-]+\.\w+", answer.text.replace("http://www.w3.org/", ""))
        assert not outside, f"{name} fetches from elsewhere"
        for module in re.findall(r'from "\./([^"]+)"', answer.text):
            assert module in files(), f"{name} imports it"
    assert " style=" not in page.text, "the policy forbids styles in the page"
    assert not re.search(r"<script(?! type=\"module\" src=)", page.text), "and scripts in it"


@on_shared_loop
async def test_a_browser_asks_whether_its_copy_is_the_newest(shared_client: httpx.AsyncClient) -> None:
    first = await shared_client.get("/console/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await shared_client.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    older = await shared_client.get("/console/main.js", headers={"if-none-match": '"older"'})
    assert (older.status_code, older.content) == (200, first.content)


@on_shared_loop
@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "%2e%2e/__init__.py", "static/main.js", ""])
async def test_there_are_no_other_files(shared_client: httpx.AsyncClient, name: str) -> None:
    assert (await shared_client.get(f"/console/{name}")).status_code == 404


async def test_with_keys_the_page_is_open_and_what_it_shows_is_not(nodes: FakeCluster) -> None:
    keys = {"api_key": (SecretStr("sk-one"),), "admin_api_key": (SecretStr("sk-admin"),)}
    async with running(nodes, **keys) as (_, client):
        for path in ("/", "/console/main.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/debug/console", "/debug/requests", "/docs", "/console/nothing.js"):
            assert (await client.get(path)).status_code == 401
        shown = await client.get("/debug/console", headers=bearer("sk-one"))
        assert shown.json()["has_admin"] is True
        assert (await client.get("/debug/console", headers=bearer("sk-admin"))).status_code == 401


async def test_without_the_console_its_snapshot_stays(nodes: FakeCluster) -> None:
    async with running(nodes, console=False) as (_, client):
        for path in ("/", "/console/main.js"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/debug/console")).status_code == 200, "`baton top` reads it"


async def test_polling_is_not_logged(
    client: httpx.AsyncClient, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="router.http.scope"):
        await snapshot_of(client)
        await client.get("/debug/requests")
        await client.get("/version")
    assert [record.getMessage().split()[1] for record in caplog.records] == ["/version"]


# ---- several workers ----


def work(tokens: int, **more: Any) -> dict[str, Any]:
    empty = {"bounds": [], "counts": []}
    flows = [{"source": "p", "target": "d", "num_bytes": tokens, "num_handoffs": 1}]
    base = {"requests": {"queued": 1}, "num_ended": {}, "num_prompt_tokens": tokens, "num_generation_tokens": tokens}
    base["num_tokens_by_node"] = {"p": tokens}
    return {**base, "first_token_s": empty, "inter_token_s": empty, "flows": flows, **more}


def test_the_work_of_workers_is_added_up() -> None:
    one = work(3, num_ended={"finished": 2}, first_token_s={"bounds": [1.0], "counts": [1, 2]})
    two = work(4, num_ended={"failed": 1}, first_token_s={"bounds": [1.0], "counts": [10, 20]})
    total = add_up([work(0), one, two])
    assert (total["requests"], total["num_ended"]) == ({"queued": 3}, {"finished": 2, "failed": 1})
    assert total["first_token_s"] == {"bounds": [1.0], "counts": [11, 22]}
    assert total["num_tokens_by_node"] == {"p": 7}
    assert total["flows"] == [{"source": "p", "target": "d", "num_bytes": 7, "num_handoffs": 3}]
    assert one["flows"][0]["num_bytes"] == 3, "what was given stays as it is"


async def test_a_worker_that_does_not_answer_is_counted(
    client: httpx.AsyncClient, router: Router, tmp_path: Path
) -> None:
    shown = await snapshot_of(client)
    assert (shown["num_workers"], shown["num_workers_answered"]) == (1, 1)
    server = router.server
    siblings = Siblings(WorkerPlace(0, 2, tmp_path))
    metrics = RouterMetrics(CollectorRegistry())
    snapshot = Snapshot(server.cluster, server.core, metrics, server.models, False, siblings)
    shown = json.loads(bytes((await snapshot.now()).body))
    assert (shown["num_workers"], shown["num_workers_answered"]) == (2, 1)


# ---- the parts ----


def test_histograms_and_counters_are_summed_over_models() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for model in ("a", "b"):
        metrics.first_token_s.labels(model).observe(0.003)
        metrics.first_token_s.labels(model).observe(9999.0)
        metrics.prompt_tokens.labels(model).inc(5)
    found = histogram_of(metrics.first_token_s)
    assert (found["bounds"][:2], found["counts"][:3]) == ([0.001, 0.005], [0, 2, 0])
    assert (found["counts"][-1], sum(found["counts"])) == (2, 4)
    assert sums_of(metrics.prompt_tokens, "model_name") == {"a": 5, "b": 5}


def test_the_pairs_that_were_used_longest_ago_are_forgotten() -> None:
    flows = KvFlows(max_pairs=2)
    for source, target in (("p", "d"), ("q", "d"), ("p", "d"), ("r", "d")):
        flows.add(source, target, 10)
    assert flows.totals() == [KvFlow("p", "d", 20, 2), KvFlow("r", "d", 10, 1)]
