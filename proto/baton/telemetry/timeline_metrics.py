"""Metrics of a router that follow from the timelines of requests that have ended."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from baton.messages import Adopted
from baton.telemetry.tally import HistogramByModel, TallyHistogram
from baton.telemetry.timeline import STAGES, AttemptTimeline, Timeline, first_token_stages

PHASE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0),
)
"""Of a part of a request, which may be nearly all of it."""
_SOURCES = ("prefill_node", "decode_node")


class TimelineMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._stage_s = HistogramByModel(
            "baton:time_to_first_token_stage_seconds",
            "Parts of the time to first token, which add up to it; requests without a stage do not count in it.",
            PHASE_S,
            registry,
            "stage",
        )
        self._stages: dict[str, dict[str, TallyHistogram]] = {}  # by model
        self._hits = Counter(
            "baton:prefix_hit_tokens",
            "Prompt tokens found in a prefix cache: on the prefill node (not computed) or the decode node (not sent).",
            ["model_name", "source"],
            registry=registry,
        )
        self._failovers = Counter(
            "baton:failovers",
            "Attempts that failed and were followed by another one, by the state that they were in.",
            ["model_name", "state"],
            registry=registry,
        )

    def observe(self, timeline: Timeline) -> None:
        stages = self._of_model(timeline.model)
        for stage, seconds in first_token_stages(timeline).items():
            stages[stage].observe(seconds)
        first, adopted = None, None
        for attempt in timeline.attempts:
            if first is None and attempt.started_at_s is not None:
                first = attempt
            if adopted is None:
                adopted = attempt.adopted
            if attempt.error and attempt.attempt < max(later.attempt for later in timeline.attempts):
                self._failovers.labels(timeline.model, attempt.state).inc()
        if first is not None:
            self._count_hits(timeline.model, first, adopted)

    def _of_model(self, model: str) -> dict[str, TallyHistogram]:
        """All series are there from a model's first request on, so that no rate misses the first of a stage."""
        stages = self._stages.get(model)
        if stages is None:
            stages = self._stages[model] = {stage: self._stage_s.labels(model, stage) for stage in STAGES}
            for source in _SOURCES:
                self._hits.labels(model, source)
        return stages

    def _count_hits(self, model: str, first: AttemptTimeline, adopted: Adopted | None) -> None:
        """A prompt counts once, as it came: later attempts find what the earlier ones left in the caches. `first`: the
        first attempt that began; `adopted`: of the first handoff."""
        alone = first.estimate.kind == "decode_alone"
        if first.num_cached_tokens:
            self._hits.labels(model, "decode_node" if alone else "prefill_node").inc(first.num_cached_tokens)
        if adopted is not None and adopted.num_cached_tokens and not alone:
            self._hits.labels(model, "decode_node").inc(adopted.num_cached_tokens)
