"""Counters and histograms for what happens for each token and each request, from one thread: plain numbers, without
locks.

prometheus_client's own take a lock and walk all buckets at each observation, which cost the router more than reading
the token. These look the same on the page, and are used alike: `labels`, then `inc` or `observe`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

_LABEL = "model_name"


class TallyCounter:
    """`count` is a running total."""

    def __init__(self) -> None:
        self.count = 0
        self.created = time.time()

    def inc(self, number: int = 1) -> None:
        self.count += number


class TallyHistogram:
    """`counts[i]`: observations above the bound before and up to bound i; the last: above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.created = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class CounterByModel:
    """A metric of one counter for each model, and for each value of the further `labels`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, *labels: str) -> None:
        self._name, self._text = name, text
        self._labels = [_LABEL, *labels]
        self._tallies: dict[tuple[str, ...], TallyCounter] = {}
        registry.register(self)

    def labels(self, *values: str) -> TallyCounter:
        """The model, and a value of each further label."""
        if values not in self._tallies:
            self._tallies[values] = TallyCounter()
        return self._tallies[values]

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, tally in self._tallies.items():
            family.add_metric(values, tally.count, tally.created)
        return [family]


class HistogramByModel:
    """A metric of one histogram for each model, and for each value of the further `labels`."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry, *labels: str
    ) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._labels = [_LABEL, *labels]
        self._tallies: dict[tuple[str, ...], TallyHistogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> TallyHistogram:
        """The model, and a value of each further label."""
        if values not in self._tallies:
            self._tallies[values] = TallyHistogram(self._bounds)
        return self._tallies[values]

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, tally in self._tallies.items():
            total, buckets = 0, []
            for name, count in zip(names, tally.counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            family.add_metric(values, buckets, tally.sum)
            labels = dict(zip(self._labels, values, strict=True))
            family.add_sample(f"{self._name}_created", labels, tally.created)
        return [family]
