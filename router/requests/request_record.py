"""What the router notes of a live request, so that its end has a timeline: see `baton.telemetry.timeline`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.telemetry.timeline import AttemptTimeline, Estimate
from baton.telemetry.trace_context import TraceContext

MAX_RECORDED_ATTEMPTS = 16
"""Of one request that are remembered: the first ones. Requests with many samples can have more."""


class Preparation(NamedTuple):
    """What a front end did with a request before it was placed: seconds since its receipt. `received_at`: the time of
    day of that."""

    received_at: float
    read_at_s: float
    tokenized_at_s: float
    trace: TraceContext | None = None


UNPREPARED = Preparation(0.0, 0.0, 0.0)
"""Of a request that is placed as it is received."""


@dataclass(slots=True)
class RequestRecord:
    """Of one request. `first`, `first_waits_for_decode`: see Timeline."""

    submitted_at_s: float = 0.0
    attempts: list[AttemptTimeline] = field(default_factory=list)
    num_attempts: int = 0
    first: AttemptTimeline | None = None
    first_waits_for_decode: bool = False

    @property
    def last(self) -> AttemptTimeline | None:
        return self.attempts[-1] if self.attempts else None

    def placed(
        self, attempt: int, samples: tuple[int, ...], nodes: tuple[str, str], estimate: Estimate, at_s: float
    ) -> AttemptTimeline:
        """`nodes`: those that compute the prompt and generate; the same one if it does both."""
        timeline = AttemptTimeline(attempt, samples, *nodes, estimate, at_s)
        self.num_attempts += 1
        if len(self.attempts) < MAX_RECORDED_ATTEMPTS:
            self.attempts.append(timeline)
        return timeline
