"""What one router process counts, as plain values: running totals, of which readers take differences."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import Metric

from baton.telemetry import RouterMetrics
from router.requests.core import RouterCore


class Collector(Protocol):
    """A metric of prometheus_client, or of `baton.telemetry.tally`."""

    def collect(self) -> Iterable[Metric]: ...


def work_of(metrics: RouterMetrics, core: RouterCore) -> dict[str, Any]:
    """Totals since the process began; `requests` is of this moment."""
    return {
        "requests": core.num_requests_by_state(),
        "num_ended": sums_of(metrics.ends, "outcome"),
        "num_prompt_tokens": sum(sums_of(metrics.prompt_tokens, "model_name").values()),
        "num_generation_tokens": sum(sums_of(metrics.generation_tokens, "model_name").values()),
        "first_token_s": histogram_of(metrics.first_token_s),
        "inter_token_s": histogram_of(metrics.inter_token_s),
        "num_tokens_by_node": core.pool.num_tokens(),
        "flows": [dataclasses.asdict(flow) for flow in core.kv_flows.totals()],
    }


def sums_of(counter: Collector, label: str) -> dict[str, int]:
    """A counter's totals by the value of a label, over all others."""
    sums: Counter[str] = Counter()
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                sums[sample.labels[label]] += int(sample.value)
    return dict(sums)


def histogram_of(histogram: Collector) -> dict[str, Any]:
    """Over all models: `counts[i]` observations above the bound before and up to `bounds[i]`, the last above all."""
    totals: Counter[float] = Counter()
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                totals[float(sample.labels["le"])] += int(sample.value)
    bounds = sorted(totals)
    counts = [totals[bound] - (totals[bounds[i - 1]] if i else 0) for i, bound in enumerate(bounds)]
    return {"bounds": [bound for bound in bounds if bound != math.inf], "counts": counts}


def add_up(works: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several processes."""
    total: dict[str, Any] = {}
    for work in works:
        total = {name: _added(total[name], value) for name, value in work.items()} if total else dict(work)
    return total


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and "counts" in one:
        return _added_histograms(one, other)
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    if isinstance(one, list):
        return _added_flows([*one, *other])
    return one + other


def _added_histograms(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A process without observations has no bounds yet."""
    if not one["counts"] or not other["counts"]:
        return one if one["counts"] else other
    return {**one, "counts": [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]}


def _added_flows(flows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for flow in flows:
        pair = flow["source"], flow["target"]
        before = pairs.get(pair, {"num_bytes": 0, "num_handoffs": 0})
        sums = {name: before[name] + flow[name] for name in ("num_bytes", "num_handoffs")}
        pairs[pair] = {"source": pair[0], "target": pair[1], **sums}
    return list(pairs.values())
