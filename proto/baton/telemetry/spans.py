"""A timeline as the spans of one trace: the request's own, one for each stage in the router, and those of its nodes.

    llm_request                         router
    |- receive, tokenize, place         router
    `- attempt                          router
       |- prefill_node                  prefill node: queue, prefill, reserve, transfer
       `- decode_node                   decode node

The router reports the spans of nodes too, since it has all of the timeline. A node's moments count from its receipt of
the request. That is taken to be half of a round trip after the router sent it, as NTP does: the time from there to the
node's first answer, less what the node says it took until then. Attributes have the names of OpenTelemetry's
conventions for generative AI, and vLLM's for what these lack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.telemetry.timeline import AttemptTimeline, Timeline, first_token_stages
from baton.telemetry.trace_context import draw_span_id

ROUTER_SERVICE, PREFILL_SERVICE, DECODE_SERVICE = "baton-router", "baton-prefill", "baton-decode"
_IN_ROUTER = ("receive", "tokenize", "place", "wait_for_node")

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """Of the process `service`, `instance`. Seconds since 1970. `error`: empty if it went well."""

    name: str
    service: str
    instance: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def spans_of(timeline: Timeline, router: str) -> list[Span]:
    """The request's span first; empty if it has no trace, or one that is not recorded. `router`: the name of this
    one."""
    trace = timeline.trace
    if trace is None or not trace.sampled:
        return []
    began = timeline.received_at
    root = Span(
        "llm_request",
        ROUTER_SERVICE,
        router,
        trace.span_id,
        trace.parent_id,
        began,
        began + timeline.ended_at_s,
        _of_request(timeline),
        timeline.error,
    )
    spans, at_s = [root], 0.0
    stages = first_token_stages(timeline)
    for name in _IN_ROUTER:
        if seconds := stages.get(name, 0.0):
            spans.append(_child(root, name, ROUTER_SERVICE, router, began + at_s, began + at_s + seconds))
            at_s += seconds
    for attempt in timeline.attempts:
        spans += _of_attempt(attempt, timeline, root)
    return spans


def _of_request(timeline: Timeline) -> Attributes:
    found: Attributes = {
        "gen_ai.request.id": timeline.client_id,
        "gen_ai.response.model": timeline.model,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "gen_ai.usage.prompt_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": timeline.num_output_tokens,
        "gen_ai.request.n": timeline.num_samples,
        "gen_ai.latency.e2e": timeline.ended_at_s,
        "baton.num_attempts": timeline.num_attempts,
    }
    if timeline.first_token_at_s:
        found["gen_ai.latency.time_to_first_token"] = timeline.first_token_at_s
    for name, seconds in first_token_stages(timeline).items():
        found[f"baton.time_to_first_token.{name}_s"] = seconds
    return found


def _of_attempt(attempt: AttemptTimeline, timeline: Timeline, root: Span) -> list[Span]:
    began, ended_at_s = timeline.received_at, attempt.ended_at_s
    end = began + (timeline.ended_at_s if ended_at_s is None else ended_at_s)
    why = attempt.estimate
    whole = _child(root, "attempt", ROUTER_SERVICE, root.instance, began + attempt.placed_at_s, end, attempt.error)
    whole.attributes.update(
        {
            "baton.attempt": attempt.attempt,
            "baton.placement.policy": why.policy,
            "baton.placement.kind": why.kind,
            "baton.placement.expected_queue_s": why.queue_s,
            "baton.placement.expected_prefill_s": why.prefill_s,
            "baton.placement.expected_alone_s": why.alone_s,
        }
    )
    spans = [whole]
    if attempt.started_at_s is not None:
        spans += _of_prompt(attempt, whole, began)
    if attempt.adopted_at_s is not None:
        spans.append(_of_decode(attempt, whole, began + attempt.adopted_at_s))
    return spans


def _of_prompt(attempt: AttemptTimeline, whole: Span, began: float) -> list[Span]:
    """The node that computes the prompt; `began`: when the request was received."""
    assert attempt.started_at_s is not None
    round_trip_s = max(0.0, attempt.started_at_s - attempt.placed_at_s - attempt.queue_s)
    received = began + attempt.placed_at_s + round_trip_s / 2
    alone = attempt.estimate.kind == "decode_alone"
    service, times = DECODE_SERVICE if alone else PREFILL_SERVICE, attempt.prompt
    computed_s = times.computed_s if times else attempt.queue_s + (attempt.prefill_s or 0.0)
    last_s = max(computed_s, times.granted_s, times.last_part_s) if times else computed_s
    end = whole.end_s if alone else received + last_s
    node = _child(whole, "decode_node" if alone else "prefill_node", service, attempt.prefill_node, received, end)
    node.attributes["baton.num_cached_tokens"] = attempt.num_cached_tokens
    pieces = [("queue", 0.0, attempt.queue_s), ("prefill", attempt.queue_s, computed_s)]
    if times is not None:
        node.attributes["baton.num_chunks"] = times.num_chunks
        if times.granted_s > times.computed_s:
            pieces.append(("reserve", times.computed_s, times.granted_s))
        if times.num_parts:
            pieces.append(("transfer", times.first_part_s, times.last_part_s))
            node.attributes["baton.num_held_blocks"] = times.num_held_blocks
    if alone and attempt.decode is not None:
        node.attributes["baton.num_steps"] = attempt.decode.num_steps
    children = [
        _child(node, name, service, attempt.prefill_node, received + start_s, received + end_s)
        for name, start_s, end_s in pieces
    ]
    return [node, *children]


def _of_decode(attempt: AttemptTimeline, whole: Span, adopted: float) -> Span:
    """The node that the request was handed over to, from when it has its KV."""
    span = _child(whole, "decode_node", DECODE_SERVICE, attempt.decode_node, adopted, whole.end_s)
    if attempt.adopted is not None:
        span.attributes["baton.transfer_bytes"] = attempt.adopted.transfer_bytes
        span.attributes["baton.transfer_s"] = attempt.adopted.transfer_s
        span.attributes["baton.step_wait_s"] = attempt.adopted.step_wait_s
        span.attributes["baton.num_cached_tokens"] = attempt.adopted.num_cached_tokens
    if attempt.decode is not None:
        span.attributes["baton.num_steps"] = attempt.decode.num_steps
        if attempt.decode.longest:
            span.attributes["baton.longest_gap_s"] = attempt.decode.longest[0].gap_s
    return span


def _child(parent: Span, name: str, service: str, instance: str, start_s: float, end_s: float, error: str = "") -> Span:
    return Span(name, service, instance, draw_span_id(), parent.span_id, start_s, max(start_s, end_s), error=error)
