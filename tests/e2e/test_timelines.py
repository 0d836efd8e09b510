"""Timelines of requests on real nodes: their stages add up, and each node has told its part."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.collector import Collector, first_token_of
from tests.docs.test_metrics_page import in_table
from tests.e2e.cluster import Router, wait_until
from tests.e2e.conftest import House

OF_MIXTURES = "baton:expert_"
PROMPT = (
    "The sum of 28 and 98, of 12 and 30, of 17 and 40, of 51 and 11, of 90 and 9, of 3 and 4, and of 5 and 6 is " * 3
)


def timeline_of(router: Router, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Of one request with that prompt, after its end."""
    request_id = secrets.token_hex(8)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "cache_salt": request_id}
    answer = httpx.post(
        f"{router.url}/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    wait_until(lambda: None if ids(router, request_id) else "it has not ended")
    (found,) = router.page(f"/debug/requests/{request_id}").json()["requests"]
    assert sum(found["stages_s"].values()) == pytest.approx(found["first_token_s"], abs=2e-5)
    assert found["first_token_s"] <= found["total_s"]
    return found


def ids(router: Router, request_id: str) -> list[str]:
    newest = router.page("/debug/requests?limit=5").json()["requests"]
    return [one["request_id"] for one in newest if one["request_id"].startswith(request_id)]


def test_a_pair_tells_of_chunks_transfer_and_steps(house: House) -> None:
    found = timeline_of(house.chunk_64, PROMPT, 12)
    (attempt,) = found["attempts"]
    prompt, decode = attempt["prompt"], attempt["decode"]
    assert prompt["num_chunks"] == -(-found["num_prompt_tokens"] // 64) > 1
    assert 0 <= prompt["started_s"] <= prompt["computed_s"]
    assert 0 < prompt["first_part_s"] <= prompt["last_part_s"]
    assert prompt["granted_s"] > 0
    assert prompt["num_parts"] > 0
    assert attempt["adopted"]["transfer_bytes"] > 0
    assert decode["num_steps"] == 11, "the prefill node sampled the first of the twelve tokens"
    assert 0 < len(decode["longest"]) <= 4
    assert decode["longest"][0]["gap_s"] <= decode["decode_s"]
    assert (attempt["prefill_node"], attempt["decode_node"]) == ("prefill-64", "decode-large")
    assert {"receive", "tokenize", "place", "prefill", "network"} <= found["stages_s"].keys()


def test_a_first_token_of_the_decode_node_has_the_handoff_in_it(house: House) -> None:
    """A transfer that the computation hid entirely is no stage."""
    found = timeline_of(house.chunk_2048, PROMPT, 4)
    stages, (attempt,) = found["stages_s"], found["attempts"]
    assert {"prefill", "step_wait"} <= stages.keys()
    assert stages.get("transfer", 0) == pytest.approx(attempt["adopted"]["transfer_s"], abs=1e-5)


def test_a_decode_node_alone_tells_of_its_prompt(house: House) -> None:
    found = timeline_of(house.alone, PROMPT, 4)
    (attempt,) = found["attempts"]
    assert attempt["estimate"]["kind"] == "decode_alone"
    assert attempt["prompt"]["num_chunks"] >= 1
    assert attempt["decode"]["num_steps"] == 4
    assert found["stages_s"]["prefill"] > 0


def test_a_prompt_of_one_token_of_output_ends_on_the_prefill_node(house: House) -> None:
    found = timeline_of(house.chunk_64, PROMPT, 1)
    (attempt,) = found["attempts"]
    assert (attempt["decode"], attempt["adopted"]) == (None, None)
    assert attempt["prompt"]["num_chunks"] > 1


def test_live_nodes_have_the_metrics_of_the_page(house: House) -> None:
    for node in house.nodes:
        families = text_string_to_metric_families(node.page("/metrics").text)
        told = {f.name for f in families if not f.name.startswith("process_") and not f.name.endswith("_created")}
        listed = in_table("nodes") | in_table("nodes, vllm")
        assert told == {name for name in listed if not name.startswith(OF_MIXTURES)}, node.name


def test_a_collector_gets_one_trace_of_router_and_nodes(house: House) -> None:
    """Stages add up to the time to the first token, and the spans are as long as the stages that they stand for."""
    prefill, _, decode, _ = house.nodes
    caller = f"00-{'a' * 32}-{'b' * 16}-01"
    with Collector() as collector:
        router = house.cluster.router([prefill], [decode], f"--otlp-traces-endpoint={collector.url}")
        router.wait_ready()
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "cache_salt": secrets.token_hex(8)}
        headers = {"traceparent": caller}
        answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert router.terminate() == 0, "it sends what is queued"
    found = collector.spans()
    assert found.keys() == {"baton-router", "baton-prefill", "baton-decode"}
    spans = {span.name: span for of_service in found.values() for span in of_service}
    assert {span.trace_id for span in spans.values()} == {bytes.fromhex("a" * 32)}
    root = spans["llm_request"]
    assert root.parent_span_id == bytes.fromhex("b" * 16)
    assert answer.headers["traceparent"].split("-")[2] == root.span_id.hex(), "the caller was told of it"
    first_token_s, stages = first_token_of(root)
    assert sum(stages.values()) == pytest.approx(first_token_s, rel=0.02)
    lasted = {name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for name, span in spans.items()}
    assert {"receive", "tokenize", "place", "prefill"} <= stages.keys() & lasted.keys()
    for name in stages.keys() & lasted.keys() - {"reserve"}:  # as a stage to the commit, as a span to the grant
        assert lasted[name] == pytest.approx(stages[name], rel=0.02, abs=1e-5), name
    assert first_token_s < lasted["llm_request"]
