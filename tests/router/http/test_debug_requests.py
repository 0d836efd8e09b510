"""/debug/requests: the last requests, and the timeline of one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import SecretStr

from baton.settings import SettingsError, load
from baton.telemetry.timeline_ring import TimelineRing
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.http.debug_requests import DebugRequests
from router.requests.core import RouterCore
from router.settings import RouterSettings
from router.startup import StartError, make_span_sender
from router.workers.siblings import Siblings, WorkerPlace
from tests.baton.test_timeline import named
from tests.router.conftest import Router, on_shared_loop, says
from tests.router.fake_node import FakeCluster
from tests.router.http.test_access import bearer, running
from tests.router.http_shapes import error_of


async def complete(client: httpx.AsyncClient, prompt: str | list[str], request_id: str) -> None:
    body = {"prompt": prompt, "max_tokens": 4}
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text


async def test_the_newest_requests_come_first(client: httpx.AsyncClient, nodes: FakeCluster, router: Router) -> None:
    nodes.script = says("hello")
    for name in ("first", "second"):
        await complete(client, "a", name)
    await router.idle()
    shown = (await client.get("/debug/requests")).json()["requests"]
    assert [one["request_id"].partition(".")[0] for one in shown[:2]] == ["second", "first"]
    assert sum(shown[0]["stages_s"].values()) == pytest.approx(shown[0]["first_token_s"], abs=1e-5)
    assert "network" in shown[0]["stages_s"]
    (newest,) = (await client.get("/debug/requests?limit=1")).json()["requests"]
    assert newest == shown[0]


async def test_all_prompts_of_a_request_are_found_by_its_id(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router
) -> None:
    nodes.script = says("hello")
    await complete(client, ["a", "b"], "two/prompts")
    await router.idle()
    shown = (await client.get("/debug/requests/two/prompts")).json()["requests"]
    assert len(shown) == 2
    (attempt,) = shown[0]["attempts"]
    assert attempt["estimate"]["policy"] == "cost"
    assert 0 < shown[0]["read_at_s"] <= shown[0]["tokenized_at_s"] <= shown[0]["submitted_at_s"]
    (alone,) = (await client.get(f"/debug/requests/{shown[0]['request_id']}")).json()["requests"]
    assert alone == shown[0]


async def test_a_request_that_runs_says_how_far_it_is(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router
) -> None:
    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    answer = asyncio.create_task(complete(client, "a", "runs"))
    await nodes.until(lambda: len(nodes.prefills) == 1)
    for path in ("/debug/requests", "/debug/requests/runs"):
        (shown,) = (await client.get(path)).json()["requests"]
        assert (shown["is_live"], shown["first_token_s"], shown["stages_s"]) == (True, None, {})
    (attempt,) = shown["attempts"]
    assert (attempt["adopted_at_s"], attempt["ended_at_s"]) == (None, None)
    hold.set()
    await answer
    (shown,) = (await client.get("/debug/requests/runs")).json()["requests"]
    assert (shown["is_live"], shown["attempts"][0]["state"]) == (False, "decoding")


@on_shared_loop
@pytest.mark.parametrize("limit", ["0", "1001", "-1", "ten", "", "1e2"])
async def test_a_limit_is_a_number_in_its_range(shared_client: httpx.AsyncClient, limit: str) -> None:
    response = await shared_client.get(f"/debug/requests?limit={limit}")
    assert response.status_code == 400
    assert error_of(response)["param"] == "limit"
    assert "1 to 1000" in error_of(response)["message"]


@on_shared_loop
@pytest.mark.parametrize(
    ("request_id", "says_"),
    [
        ("nobody", "No request 'nobody' is among"),
        ("a%20b", "No request 'a b' is among"),
        ("x" * 161, "is among those remembered"),
        ("a%0Arequests 5", "There is nothing at"),  # no path may have a line's end
    ],
)
async def test_a_request_that_is_not_remembered_is_a_404(
    shared_client: httpx.AsyncClient, request_id: str, says_: str
) -> None:
    response = await shared_client.get(f"/debug/requests/{request_id}")
    assert response.status_code == 404
    assert says_ in error_of(response)["message"]


async def test_timelines_need_a_key_where_others_do(nodes: FakeCluster) -> None:
    async with running(nodes, api_key=(SecretStr("sk-one"),), max_timeline_bytes=0) as (_, client):
        assert (await client.get("/debug/requests")).status_code == 401
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=bearer("sk-one"))
        shown = await client.get("/debug/requests", headers=bearer("sk-one"))
        assert shown.json() == {"requests": []}, "with no bytes for them, none is kept"


async def test_a_trace_goes_on_through_the_router(
    client: httpx.AsyncClient, nodes: FakeCluster, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.script = says("hello")
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "x-request-id": "traced"}
    with caplog.at_level("INFO", logger="router.generation"):
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        await router.idle()
    version, trace_id, span_id, _ = answer.headers["traceparent"].split("-")
    assert (version, trace_id) == ("00", "1" * 32)
    assert span_id != "2" * 16
    (shown,) = (await client.get("/debug/requests/traced")).json()["requests"]
    assert shown["trace_id"] == "1" * 32
    (line,) = [record for record in caplog.records if record.message.startswith("ended")]
    fields = line.fields()  # type: ignore[attr-defined]
    assert (fields["trace_id"], fields["stages_s"]) == ("1" * 32, shown["stages_s"])
    plain = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert "traceparent" not in plain.headers, "nobody began a trace"


async def test_a_trace_goes_on_over_grpc(client: httpx.AsyncClient, nodes: FakeCluster, router: Router) -> None:
    nodes.script = says("hello")
    given = (("x-request-id", "traced"), ("traceparent", f"00-{'1' * 32}-{'2' * 16}-00"))
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(prompt="a", max_tokens=1), metadata=given)
        told = str(dict(await call.initial_metadata())["traceparent"])
        assert [response async for response in call]
    assert told.startswith(f"00-{'1' * 32}-")
    assert told.endswith("-00"), "the caller does not want it recorded"
    (shown,) = (await client.get("/debug/requests/traced")).json()["requests"]
    assert shown["trace_id"] == "1" * 32


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host/x", "http://", "http:///v1/traces"])
def test_a_collector_has_a_url(url: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-traces-endpoint: must be a URL"):
        load(RouterSettings, {"decode": "h:1", "otlp_traces_endpoint": url})


def test_traces_need_the_packages_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = load(RouterSettings, {"decode": "h:1", "otlp_traces_endpoint": "http://h:4318/v1/traces"})
    with pytest.raises(StartError, match=r"--otlp-traces-endpoint: .*pip install 'baton-serve\[otlp\]'"):
        make_span_sender(settings)


async def test_each_worker_tells_of_the_requests_of_all(tmp_path: Path) -> None:
    pages, all_siblings = [], []
    idle = RouterCore(1).requests
    for index in range(2):
        ring = TimelineRing(2**20)
        ring.add(named(f"worker-{index}.0"))
        siblings = Siblings(WorkerPlace(index, 2, tmp_path))
        pages.append(DebugRequests(ring, idle, siblings))
        await siblings.start()
        all_siblings.append(siblings)
    try:
        for page in pages:
            for index in range(2):
                shown = bytes((await page.one(f"worker-{index}")).body)
                assert f'"worker-{index}.0"'.encode() in shown
    finally:
        for siblings in all_siblings:
            siblings.close()
