"""vLLM's names of metrics beside our own, for tools that look for those: endpoint pickers, autoscalers, dashboards.

They are copies, made when a page is read, with vLLM's label `engine` and the `role` of the process. Router and nodes
both have some of them, from their own point of view, so a sum over a fleet has to select a role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

PREFIX = "vllm:"
_ENGINE = {"engine": "0"}
_STARTED = time.time()
_WAITING = frozenset({"unplaced", "queued"})
"""States of a request that has not begun to be computed."""
_REASONS = {"finished": "", "cancelled": "abort", "failed": "error"}
"""vLLM's reason of an end by our outcome; empty: the finish reason itself."""

_SAME: Mapping[str, str] = {
    "baton:prompt_tokens": "prompt_tokens",
    "baton:generation_tokens": "generation_tokens",
    "baton:time_to_first_token_seconds": "time_to_first_token_seconds",
    "baton:inter_token_latency_seconds": "inter_token_latency_seconds",
    "baton:e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "baton:node_prompt_tokens": "prompt_tokens",
    "baton:node_generation_tokens": "generation_tokens",
    "baton:node_time_to_first_token_seconds": "time_to_first_token_seconds",
    "baton:node_inter_token_latency_seconds": "inter_token_latency_seconds",
    "baton:num_requests_running": "num_requests_running",
    "baton:num_requests_waiting": "num_requests_waiting",
    "baton:kv_cache_usage_perc": "kv_cache_usage_perc",
    "baton:prefix_cache_queries": "prefix_cache_queries",
    "baton:prefix_cache_hits": "prefix_cache_hits",
    "baton:num_preemptions": "num_preemptions",
    "baton:request_queue_time_seconds": "request_queue_time_seconds",
    "baton:request_prefill_time_seconds": "request_prefill_time_seconds",
    "baton:cache_config_info": "cache_config_info",
}
"""The names on the left are on pages of routers or of nodes, none on both."""


def vllm_metrics(metrics: Iterable[Metric]) -> Iterable[Metric]:
    """Copies, under vLLM's names, of those that vLLM has too."""
    for metric in metrics:
        if (name := _SAME.get(metric.name)) is not None:
            yield _renamed(metric, PREFIX + name)
        elif (convert := _CONVERTED.get(metric.name)) is not None:
            yield from convert(metric)


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit)
    old = len(metric.name)
    copy.samples = [s._replace(name=name + s.name[old:], labels=_ENGINE | s.labels) for s in metric.samples]
    return copy


def _by_state(metric: Metric) -> Iterable[Metric]:
    """A router's requests: those that wait, and those that run."""
    counts = {"waiting": 0.0, "running": 0.0}
    for sample in metric.samples:
        counts["waiting" if sample.labels["state"] in _WAITING else "running"] += sample.value
    for state, count in counts.items():
        name = f"{PREFIX}num_requests_{state}"
        family = GaugeMetricFamily(name, f"Requests that are {state}.")
        family.samples = [Sample(name, _ENGINE, count)]
        yield family


def _by_reason(metric: Metric) -> Iterable[Metric]:
    """A router's ends by vLLM's finish reasons."""
    counts: dict[tuple[str, str], float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_total"):
            labels = sample.labels
            key = labels["model_name"], _REASONS[labels["outcome"]] or labels["reason"]
            counts[key] = counts.get(key, 0.0) + sample.value
    family = CounterMetricFamily(f"{PREFIX}request_success", "Requests ended, by finish reason.")
    for (model, reason), count in counts.items():
        labels = {**_ENGINE, "model_name": model, "finished_reason": reason}
        family.samples.append(Sample(f"{PREFIX}request_success_total", labels, count))
    yield family


def _decode_pool(metric: Metric) -> Iterable[Metric]:
    """The share of KV blocks in use where a router's requests generate."""
    name = f"{PREFIX}kv_cache_usage_perc"
    family = GaugeMetricFamily(name, "Share of KV blocks in use on decode nodes, 1 is all.")
    family.samples = [
        Sample(name, _ENGINE, sample.value)
        for sample in metric.samples
        if (sample.labels["pool"], sample.labels["resource"]) == ("decode", "kv_blocks")
    ]
    yield family


def _decode_blocks(metric: Metric) -> Iterable[Metric]:
    """What the KV blocks are where a router's requests generate: their number is a label, as vLLM has it."""
    name = f"{PREFIX}cache_config_info"
    family = GaugeMetricFamily(name, "The KV blocks of the decode nodes together; always 1.")
    for sample in metric.samples:
        if sample.labels["pool"] == "decode":
            sizes = {"block_size": sample.labels["block_size"], "num_gpu_blocks": str(int(sample.value))}
            family.samples.append(Sample(name, _ENGINE | sizes, 1.0))
    yield family


def _no_adapters(metric: Metric) -> Iterable[Metric]:
    """LoRA adapters, of which there are none. vLLM's value is the time of the last change, and pickers take the series
    with the largest."""
    name = f"{PREFIX}lora_requests_info"
    family = GaugeMetricFamily(name, "LoRA adapters of requests: none are served.")
    labels = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
    family.samples = [Sample(name, labels, _STARTED)]
    yield family


_CONVERTED: Mapping[str, Callable[[Metric], Iterable[Metric]]] = {
    "baton:num_requests": _by_state,
    "baton:request_ends": _by_reason,
    "baton:pool_utilization": _decode_pool,
    "baton:pool_kv_blocks": _decode_blocks,
    "baton:build_info": _no_adapters,
}
