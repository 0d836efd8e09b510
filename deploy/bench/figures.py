"""What a run's outcomes amount to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deploy.bench.load import Outcome
from deploy.bench.stats import summary

LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, rates, and mean, p50, p90 and p99 of each latency in milliseconds, over the requests that were answered.

    Rates are over the time from the start of the run to its last end, but `offered_per_s`: over that in which requests
    were due. NaN where there is nothing to summarise.
    `cached_tokens` is None where the server says nothing of its prefix cache. `without_usage`: answers whose tokens the
    server did not count; their events count as output tokens, and nothing as input tokens.
    """
    answered = [outcome for outcome in outcomes if not outcome.error]
    duration_s = max(outcome.ended for outcome in outcomes)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    last_due_s = max(outcome.due for outcome in outcomes)
    output_tokens = sum(outcome.output_tokens for outcome in answered)
    input_tokens = sum(outcome.input_tokens for outcome in answered)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    return {
        "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "errors": dict(sorted(errors.items())),
        "duration_s": duration_s,
        "offered_per_s": (len(outcomes) - 1) / last_due_s if last_due_s else math.nan,
        "requests_per_s": len(answered) / duration_s,
        "input_tokens": input_tokens,
        "without_usage": sum(not outcome.input_tokens for outcome in answered),
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (input_tokens + output_tokens) / duration_s,
        "sent_late_ms": max(outcome.sent - outcome.due for outcome in outcomes) * 1e3,
        **{name: summary([value * 1e3 for value in values]) for name, values in latencies(answered).items()},
    }


def latencies(answered: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds by the names of `LATENCIES`."""
    return {
        "ttft_ms": [outcome.ttft for outcome in answered],
        "itl_ms": [gap for outcome in answered for gap in outcome.gaps],
        "tpot_ms": [tpot for outcome in answered if (tpot := outcome.tpot) is not None],
        "e2e_ms": [outcome.ended - outcome.sent for outcome in answered],
    }
