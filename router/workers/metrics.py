"""The metrics of all workers as one page: each sample has the label `worker` of the process that it comes from.

Nothing is added up here. A worker that starts again begins its counters anew, which a scraper can only see series by
series; and what all workers see, such as the number of nodes, is not to be added up at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.samples import Sample

from baton.telemetry import ROUTER

_WORKER = "worker"


def plain_metrics(registry: CollectorRegistry) -> list[dict[str, Any]]:
    """All metrics of this process, in JSON's types."""
    return [
        {
            "name": metric.name,
            "text": metric.documentation,
            "type": metric.type,
            "unit": metric.unit,
            "samples": [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        }
        for metric in registry.collect()
    ]


class AllWorkersMetrics(CollectorRegistry):
    """`by_worker`: each worker's `plain_metrics`; None: it did not answer, as `baton:worker_up` says."""

    def __init__(self, by_worker: Mapping[int, list[dict[str, Any]] | None]) -> None:
        super().__init__()
        self._by_worker = by_worker

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for worker, metrics in self._by_worker.items():
            for plain in metrics or ():
                family = found.setdefault(
                    plain["name"], Metric(plain["name"], plain["text"], plain["type"], plain["unit"])
                )
                family.samples += [
                    Sample(name, {**labels, _WORKER: str(worker)}, value) for name, labels, value in plain["samples"]
                ]
        up = GaugeMetricFamily(
            "baton:worker_up", "1: the worker's metrics are on this page; 0: it gave none.", labels=["role", _WORKER]
        )
        for worker, metrics in self._by_worker.items():
            up.add_metric([ROUTER, str(worker)], float(metrics is not None))
        return [*found.values(), up]
