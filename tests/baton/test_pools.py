"""Which pool limits the throughput, by rules; and metrics under vLLM's names."""

import dataclasses

import pytest

from baton.messages import Adopted
from baton.node_info import NodeRole
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from baton.telemetry.pools import PoolState, bottleneck
from baton.telemetry.timeline import AttemptTimeline, Estimate, Timeline
from tools.metrics_page import node_registry, router_registry

IDLE = PoolState(2, 0, 2, 8, 10, 100)
FULL = dataclasses.replace(IDLE, num_blocks_used=90)
SEATED = dataclasses.replace(IDLE, num_running=8)
ABSENT = PoolState()


def waiting(pool: PoolState, number: int) -> PoolState:
    return dataclasses.replace(pool, num_waiting=number)


@pytest.mark.parametrize(
    ("prefill", "decode", "found"),
    [
        (IDLE, IDLE, "none"),
        (IDLE, FULL, "none"),
        (waiting(IDLE, 1), IDLE, "none"),
        (waiting(IDLE, 2), IDLE, "prefill"),
        (waiting(IDLE, 9), waiting(FULL, 1), "decode"),
        (waiting(IDLE, 9), waiting(SEATED, 1), "decode"),
        (waiting(IDLE, 9), waiting(IDLE, 1), "prefill"),
        (waiting(IDLE, 9), dataclasses.replace(IDLE, num_withheld=1), "decode"),
        (ABSENT, waiting(IDLE, 1), "none"),
        (ABSENT, waiting(IDLE, 2), "decode"),
        (ABSENT, ABSENT, "none"),
    ],
)
def test_the_pool_to_grow(prefill: PoolState, decode: PoolState, found: str) -> None:
    assert bottleneck(prefill, decode) == found


def samples(registry) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_router_has_the_names_that_pickers_and_autoscalers_read():
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.set_requests({"unplaced": 1, "queued": 2, "prefilling": 3, "decoding": 4})
    metrics.pools.set({"prefill": waiting(IDLE, 5), "decode": dataclasses.replace(FULL, capacities={32: 50})})
    metrics.pools.set({"prefill": waiting(IDLE, 5), "decode": dataclasses.replace(FULL, capacities={16: 100})})
    metrics.ended("m", 1.0, None, "stop")
    metrics.prompt_tokens.labels("m").inc(7)
    found = samples(registry)
    router = {"engine": "0", "role": "router"}
    assert found["vllm:num_requests_waiting"] == [(router, 3.0)]
    assert found["vllm:num_requests_running"] == [(router, 7.0)]
    assert found["vllm:kv_cache_usage_perc"] == [(router, 0.9)]
    assert found["vllm:cache_config_info"] == [({**router, "block_size": "16", "num_gpu_blocks": "100"}, 1.0)]
    assert found["vllm:lora_requests_info"][0][0].items() >= {"max_lora": "0", "running_lora_adapters": ""}.items()
    assert found["vllm:prompt_tokens_total"] == [({**router, "model_name": "m"}, 7.0)]
    ended = {**router, "model_name": "m", "finished_reason": "stop"}
    assert found["vllm:request_success_total"] == [(ended, 1.0)]
    assert found["vllm:e2e_request_latency_seconds_count"] == [({**router, "model_name": "m"}, 1.0)]
    told = {labels["pool"]: value for labels, value in found["baton:bottleneck"]}
    assert told == {"prefill": 1.0, "decode": 0.0, "none": 0.0}


def test_a_node_has_what_endpoint_pickers_read():
    found = samples(node_registry(NodeRole.DECODE))
    ((labels, value),) = found["vllm:cache_config_info"]
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["cache_dtype"], value) == (
        "16",
        "100",
        "bfloat16",
        1,
    )
    ((labels, value),) = found["vllm:lora_requests_info"]
    assert labels["max_lora"] == "0"
    assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds_sum")
    for name in (*names, "prefix_cache_hits_total", "prefix_cache_queries_total", "num_preemptions_total"):
        assert f"vllm:{name}" in found


def test_failed_attempts_and_cached_tokens_are_counted_from_timelines():
    found = samples(router_registry())
    (failover,) = found["baton:failovers_total"]
    assert (failover[0]["state"], failover[1]) == ("handing_off", 1.0)
    hits = {labels["source"]: value for labels, value in found["baton:prefix_hit_tokens_total"]}
    assert hits == {"prefill_node": 16.0, "decode_node": 0.0}


def test_what_failed_attempts_left_in_the_caches_is_no_hit():
    """A request with two answers, whose nodes were lost while they generated: nothing of its prompt was cached."""
    why = Estimate("cost", "pair", 0.0, 0.0, 0.0, 0, 0.0)
    lost = AttemptTimeline(0, (0, 1), "p", "d", why, 0.1, started_at_s=0.2, error="lost", state="decoding")
    lost.note_adopted(Adopted(0.0, 16, 0), 0.3)
    again = [
        AttemptTimeline(1, (sample,), "p", "d2", why, 0.4, started_at_s=0.5, num_cached_tokens=112) for sample in (0, 1)
    ]
    for attempt in again:
        attempt.note_adopted(Adopted(0.0, 64, 0), 0.6)
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.timelines.observe(Timeline("r.0", "m", 0.0, 0.0, 0.0, 0.0, 0.3, 2.0, 100, 40, 2, (lost, *again), 0))
    hits = {labels["source"]: value for labels, value in samples(registry)["baton:prefix_hit_tokens_total"]}
    assert hits == {"prefill_node": 0.0, "decode_node": 16.0}


def test_an_attempt_that_never_began_counts_in_no_cache():
    why = Estimate("cost", "decode_alone", 0.0, 0.0, 0.0, 0, 0.0)
    lost = AttemptTimeline(0, (0,), "d", "d", why, 0.1, error="lost", state="queued")
    done = AttemptTimeline(1, (0,), "d2", "d2", why, 0.2, started_at_s=0.3, num_cached_tokens=32)
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.timelines.observe(Timeline("r.0", "m", 0.0, 0.0, 0.0, 0.0, 0.4, 2.0, 100, 40, 1, (lost, done), 1))
    hits = {labels["source"]: value for labels, value in samples(registry)["baton:prefix_hit_tokens_total"]}
    assert hits == {"prefill_node": 0.0, "decode_node": 32.0}
