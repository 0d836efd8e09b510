"""A node's tokens: how many there are, and how long each took.

Each token is counted here, on the thread that passes tokens on, so the metrics are plain numbers (`telemetry.tally`).
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from baton.messages import AttemptId
from baton.telemetry.tally import CounterByModel, HistogramByModel

# As in vLLM, with finer steps at the low end of the inter-token latency.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class TokenMetrics:
    """For one thread only. Times are of `clock`, in seconds."""

    def __init__(self, registry: CollectorRegistry, model: str, clock: Callable[[], float]) -> None:
        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> HistogramByModel:
            return HistogramByModel(f"baton:{name}", text, bounds, registry)

        self._clock = clock
        self._received: dict[AttemptId, float] = {}  # until the first token
        self._last: dict[AttemptId, dict[int, float]] = {}  # the time of each sample's last token
        self._generated = CounterByModel("baton:node_generation_tokens", "Tokens generated.", registry).labels(model)
        self._first_token_s = histogram(
            "node_time_to_first_token_seconds", "Receipt of a prompt here to its first token.", FIRST_TOKEN_S
        ).labels(model)
        self._inter_token_s = histogram(
            "node_inter_token_latency_seconds", "Between neighbouring tokens of a sample.", INTER_TOKEN_S
        ).labels(model)

    def received(self, attempt_id: AttemptId) -> None:
        """A prompt is here."""
        self._received[attempt_id] = self._clock()

    def sent(self, attempt_id: AttemptId, sample: int, num_tokens: int) -> None:
        """So many tokens of the sample have come, at once, and share the time since the one before them."""
        self._generated.inc(num_tokens)
        now, last = self._clock(), self._last.get(attempt_id)
        if last is None:
            last = self._last[attempt_id] = {}
            if received := self._received.pop(attempt_id, None):
                self._first_token_s.observe(now - received)
        if sample in last:
            self._inter_token_s.observe((now - last[sample]) / num_tokens, num_tokens)
        last[sample] = now

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended."""
        self._received.pop(attempt_id, None)
        self._last.pop(attempt_id, None)

    def lost(self, epoch: int) -> None:
        """A router is gone, and its requests with it."""
        for attempt_id in {*self._received, *self._last}:
            if attempt_id.router_epoch == epoch:
                self.forget(attempt_id)
