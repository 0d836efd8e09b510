"""What the router counts of its requests, from the events that pass through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.messages import SampleEnd, Tokens
from baton.telemetry import RouterMetrics
from baton.telemetry.timeline import Timeline
from baton.telemetry.timeline_ring import TimelineRing
from router.requests.request_state import RequestEnd, RequestEvent, RoutedRequest


class _ModelMetrics:
    """Those of one model, looked up once."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.first_token_s = metrics.first_token_s.labels(model)
        self.first_token_ratio = metrics.first_token_ratio.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.inter_token_s = metrics.inter_token_s.labels(model)


@dataclass(slots=True)
class _Account:
    model: str
    received: float
    metrics: _ModelMetrics
    last_token: dict[int, float] = field(default_factory=dict)  # sample -> when its newest token came
    finish_reason: str = "stop"  # also that of a stop string, which only the front end sees


class RequestMetrics:
    """One account per live request. `model` returns the served name for what is of no model. `timelines`: those of
    requests that have ended, as many as it keeps; `send` gets each of them too, and must not raise. Times are seconds
    of one monotonic clock."""

    def __init__(
        self,
        metrics: RouterMetrics,
        model: Callable[[], str],
        timelines: TimelineRing | None = None,
        send: Callable[[Timeline], None] | None = None,
    ) -> None:
        self.metrics = metrics
        self.timelines = TimelineRing(0) if timelines is None else timelines
        self._model = model
        self._send = send
        self._open: dict[str, _Account] = {}
        self._of_models: dict[str, _ModelMetrics] = {}

    def opened(self, request: RoutedRequest, received: float) -> None:
        model = self._model_of(request)
        if model not in self._of_models:
            self._of_models[model] = _ModelMetrics(self.metrics, model)
        metrics = self._of_models[model]
        self._open[request.request_id] = _Account(model, received, metrics)
        metrics.prompt_tokens.inc(len(request.prompt_tokens))

    def refused(self, error: BatonError, request: RoutedRequest | None = None) -> None:
        """A request that could not be placed at all; None: it did not come so far."""
        self.metrics.refused(self._model_of(request), error)

    def retried(self, cause: str, request_id: str) -> None:
        """`request_id`: of the attempt, so that of a single sample ends with its index."""
        account = self._open.get(request_id) or self._open.get(request_id.rpartition("/")[0])
        self.metrics.attempts.labels(account.model if account else self._model(), cause).inc()

    def _model_of(self, request: RoutedRequest | None) -> str:
        return request.version.name if request is not None and request.version else self._model()

    def event(self, request_id: str, event: RequestEvent, now: float) -> None:
        account = self._open[request_id]
        match event:
            case Tokens():
                self._tokens(account, event.sample, len(event.token_ids), now)
            case SampleEnd(_, reason, _):
                account.finish_reason = reason.value
            case RequestEnd(error, timings, timeline):
                del self._open[request_id]
                if timeline is not None:
                    self._take(timeline)
                if timings.num_attempts == 1 and timings.first_token_s and timings.expected_first_token_s:
                    ratio = timings.first_token_s / timings.expected_first_token_s
                    account.metrics.first_token_ratio.observe(ratio)
                self.metrics.ended(account.model, timings.total_s, error, account.finish_reason)

    def _take(self, timeline: Timeline) -> None:
        self.metrics.timelines.observe(timeline)
        self.timelines.add(timeline)
        if self._send is not None:
            self._send(timeline)

    def _tokens(self, account: _Account, sample: int, count: int, now: float) -> None:
        account.metrics.generation_tokens.count += count
        last = account.last_token.get(sample)
        if last is not None:
            account.metrics.inter_token_s.observe((now - last) / count, count)
        elif not account.last_token:
            account.metrics.first_token_s.observe(now - account.received)
        account.last_token[sample] = now
