"""A node's counters of its engine's steps: where their time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter


class StepMetrics:
    """Counters that follow totals which the engine keeps. labels, values: of all of them."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str], values: Sequence[str]) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"baton:{name}", text, [*labels, label], registry=registry)

        self._values = values
        self._seconds = counter(
            "step_time_seconds",
            "Seconds of steps by phase: schedule, launch, output on the host; device; gap: it idles between two.",
            "phase",
        )
        self._steps = counter("engine_steps", "Steps of the engine by what was in them: prompt, decode, mixed.", "kind")
        self._tokens = counter("iteration_tokens", "Tokens that steps computed, of prompts and of decodes.", "kind")
        self._known: dict[tuple[Counter, str], float] = {}

    def set(self, seconds: Mapping[str, float], steps: Mapping[str, int], tokens: Mapping[str, int]) -> None:
        """Totals since the start."""
        for counter, totals in ((self._seconds, seconds), (self._steps, steps), (self._tokens, tokens)):
            for name, total in totals.items():
                key = counter, name
                counter.labels(*self._values, name).inc(max(0.0, total - self._known.get(key, 0.0)))
                self._known[key] = total
