"""Timelines as plain values, for pages and log lines."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.telemetry.json_logs import moment
from baton.telemetry.timeline import AttemptTimeline, Timeline, first_token_stages

_DIGITS = 6
"""Of seconds: clocks tell no more."""


def summary(timeline: Timeline) -> dict[str, Any]:
    """One request in a list of them."""
    last = timeline.attempts[-1] if timeline.attempts else None
    return {
        "request_id": timeline.request_id,
        "model": timeline.model,
        "is_live": timeline.is_live,
        "received_at": moment(timeline.received_at),
        "first_token_s": _rounded(timeline.first_token_at_s) or None,
        "total_s": _rounded(timeline.ended_at_s),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "num_attempts": timeline.num_attempts,
        "prefill_node": last.prefill_node if last else None,
        "decode_node": last.decode_node if last else None,
        "error_code": timeline.error_code or None,
        "stages_s": _rounded(first_token_stages(timeline)),
    }


def describe(timeline: Timeline) -> dict[str, Any]:
    """All of it. Seconds; `*_at_s` since the router received the request."""
    stages = first_token_stages(timeline)
    trace = timeline.trace
    return {
        **summary(timeline),
        "num_samples": timeline.num_samples,
        "trace_id": f"{trace.trace_id:032x}" if trace else None,
        "error": timeline.error or None,
        "read_at_s": _rounded(timeline.read_at_s),
        "tokenized_at_s": _rounded(timeline.tokenized_at_s),
        "submitted_at_s": _rounded(timeline.submitted_at_s),
        "longest_stage": max(stages, key=lambda name: stages[name], default=None),
        "decode_alone": _alone(timeline),
        "attempts": [_attempt(attempt) for attempt in timeline.attempts],
    }


def log_fields(timeline: Timeline) -> dict[str, Any]:
    """For the line that is logged at a request's end, whose `request_id` is the client's."""
    fields = summary(timeline)
    fields["work"] = fields.pop("request_id")
    trace = timeline.trace
    return {**fields, "error": timeline.error or None, "trace_id": f"{trace.trace_id:032x}" if trace else None}


def _alone(timeline: Timeline) -> dict[str, Any] | None:
    """Whether a decode node alone would have been faster to the first token, as far as was known when the request was
    placed on a pair; None: it was not, or there was none."""
    if timeline.first_attempt is None:
        return None
    attempt = timeline.attempts[timeline.first_attempt]
    if attempt.estimate.kind != "pair":
        return None
    expected_s = attempt.placed_at_s + attempt.estimate.alone_s
    faster = expected_s < timeline.first_token_at_s
    return {"expected_first_token_s": _rounded(expected_s), "would_be_faster": faster}


def _attempt(attempt: AttemptTimeline) -> dict[str, Any]:
    plain: dict[str, Any] = _rounded(dataclasses.asdict(attempt))
    if attempt.decode is not None:
        plain["decode"]["longest"] = [_rounded(gap._asdict()) for gap in attempt.decode.longest]
    plain["estimate"] = _rounded(attempt.estimate._asdict())
    if attempt.adopted is not None:
        plain["adopted"] = _rounded(attempt.adopted._asdict())
    if attempt.handed_off is not None:
        del plain["handed_off"]["prompt"]  # it is the attempt's own field
    plain["moves"] = [{"node": node, "at_s": _rounded(at_s)} for node, at_s in attempt.moves]
    return plain


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
