"""What a node tells of a mixture's experts, read when its page is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily


@dataclass(frozen=True, slots=True)
class ExpertReadings:
    """Each may be called on any thread. tokens: how many have chosen each expert, in all layers together. imbalance:
    those of a layer's most chosen expert over the mean of its experts. num_rebalances: how often experts changed places
    between ranks. rank_imbalance: as `imbalance`, of ranks; None: none of them has whole experts. exchange_s: the
    seconds for which layers have gathered rows and summed results; None: not measured.
    """

    tokens: Callable[[], Sequence[int]]
    imbalance: Callable[[], float]
    num_rebalances: Callable[[], int]
    rank_imbalance: Callable[[], float] | None = None
    exchange_s: Callable[[], float] | None = None


class ExpertMetrics:
    """A collector."""

    def __init__(self, registry: CollectorRegistry, model_name: str, readings: ExpertReadings) -> None:
        self._model_name, self._readings = model_name, readings
        last = "since the page was last read."
        imbalances = {
            "expert_imbalance": (
                f"Tokens of a layer's most chosen expert over the mean of its experts, {last}",
                readings.imbalance,
            ),
            "expert_rank_imbalance": (
                f"Choices of a layer's experts on its busiest rank over the mean of its ranks, {last}",
                readings.rank_imbalance,
            ),
        }
        for name, (text, read) in imbalances.items():
            if read is not None:
                gauge = Gauge(f"baton:{name}", text, ["model_name"], registry=registry)
                gauge.labels(model_name).set_function(read)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        text = "Tokens that have chosen the expert of that number, in all layers together."
        tokens = CounterMetricFamily("baton:expert_tokens", text, labels=["model_name", "expert"])
        for expert, number in enumerate(self._readings.tokens()):
            tokens.add_metric([self._model_name, str(expert)], number)
        yield tokens
        counters = {
            "expert_exchange_seconds": (
                "Seconds in which layers of experts have gathered the rows of other ranks, and summed results.",
                self._readings.exchange_s,
            ),
            "expert_rebalances": ("How often experts changed places between ranks.", self._readings.num_rebalances),
        }
        for name, (text, read) in counters.items():
            if read is not None:
                counter = CounterMetricFamily(f"baton:{name}", text, labels=["model_name"])
                counter.add_metric([self._model_name], read())
                yield counter
