"""A timeline becomes the spans of one trace, in which each lies within its parent."""

import dataclasses
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from baton.messages import Adopted
from baton.node_times import DecodeTimes, Gap, PromptTimes
from baton.telemetry import otlp
from baton.telemetry.otlp import SpanSender
from baton.telemetry.spans import Span, spans_of
from baton.telemetry.timeline import Timeline, first_token_stages
from baton.telemetry.trace_context import TraceContext
from tests.baton.test_timeline import ATTEMPT, TIMELINE, WHY
from tests.collector import Collector, first_token_of

TRACE = TraceContext(0xABC, 0x1, 0x2)
DONE = dataclasses.replace(
    ATTEMPT,
    prompt=PromptTimes(0.1, 0.6, 2, 0.65, 0.3, 0.66, 3, 1),
    adopted=Adopted(0.03, 16, 4096, step_wait_s=0.01),
    adopted_at_s=0.9,
    ended_at_s=2.0,
    decode=DecodeTimes(9, 1.0, (Gap(4, 0.5),)),
)
TRACED = dataclasses.replace(TIMELINE, attempts=(DONE,), trace=TRACE)


def by_name(timeline: Timeline) -> dict[str, Span]:
    return {span.name: span for span in spans_of(timeline, "router-0")}


def test_a_request_is_one_tree_of_router_and_nodes():
    spans = spans_of(TRACED, "router-0")
    assert [(s.name, s.service, s.instance) for s in spans] == [
        ("llm_request", "baton-router", "router-0"),
        ("receive", "baton-router", "router-0"),
        ("tokenize", "baton-router", "router-0"),
        ("place", "baton-router", "router-0"),
        ("wait_for_node", "baton-router", "router-0"),
        ("attempt", "baton-router", "router-0"),
        ("prefill_node", "baton-prefill", "p-0"),
        ("queue", "baton-prefill", "p-0"),
        ("prefill", "baton-prefill", "p-0"),
        ("reserve", "baton-prefill", "p-0"),
        ("transfer", "baton-prefill", "p-0"),
        ("decode_node", "baton-decode", "d-0"),
    ]
    assert (spans[0].span_id, spans[0].parent_id) == (0x1, 0x2), "the span that the caller was told of, below its own"
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans)
    for span in spans[1:]:
        parent = known[span.parent_id]
        assert parent.start_s <= span.start_s <= span.end_s <= parent.end_s + 1e-6, span.name


def test_a_nodes_clock_begins_half_a_round_trip_after_the_router_sent():
    node = by_name(TRACED)["prefill_node"]
    round_trip_s = 0.17 - 0.05 - 0.1
    assert node.start_s - TIMELINE.received_at == pytest.approx(0.05 + round_trip_s / 2)
    prefill = by_name(TRACED)["prefill"]
    assert prefill.start_s - node.start_s == pytest.approx(0.1)
    assert prefill.end_s - prefill.start_s == pytest.approx(0.5)


def test_the_stages_of_the_first_token_are_on_the_requests_span():
    told = by_name(TRACED)["llm_request"].attributes
    stages = first_token_stages(TRACED)
    assert sum(float(told[f"baton.time_to_first_token.{name}_s"]) for name in stages) == pytest.approx(0.75)
    assert told["gen_ai.latency.time_to_first_token"] == 0.75
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.usage.output_tokens"] == 10


def test_a_decode_node_alone_is_one_node():
    alone = dataclasses.replace(DONE, estimate=WHY._replace(kind="decode_alone"), adopted_at_s=None)
    spans = by_name(dataclasses.replace(TRACED, attempts=(alone,)))
    assert "prefill_node" not in spans
    assert spans["queue"].service == "baton-decode"
    assert spans["decode_node"].attributes["baton.num_steps"] == 9


def test_a_failure_is_on_its_attempt_and_on_the_request():
    lost = dataclasses.replace(DONE, error="node lost")
    spans = by_name(dataclasses.replace(TRACED, attempts=(lost,), error="gave up"))
    assert (spans["attempt"].error, spans["llm_request"].error, spans["prefill"].error) == ("node lost", "gave up", "")


def test_what_is_not_recorded_has_no_spans():
    assert spans_of(TIMELINE, "r") == []
    assert spans_of(dataclasses.replace(TRACED, trace=dataclasses.replace(TRACE, sampled=False)), "r") == []


def test_a_collector_gets_the_trace():
    with Collector() as collector:
        sender = SpanSender(collector.url, "router-0")
        sender.send(TRACED)
        sender.close()
    found = collector.spans()
    assert {name: len(spans) for name, spans in found.items()} == {
        "baton-router": 6,
        "baton-prefill": 5,
        "baton-decode": 1,
    }
    spans = [span for of_service in found.values() for span in of_service]
    assert {span.trace_id for span in spans} == {(0xABC).to_bytes(16, "big")}
    root = next(span for span in spans if span.name == "llm_request")
    assert root.parent_span_id == (2).to_bytes(8, "big")
    first_token_s, stages = first_token_of(root)
    assert sum(stages.values()) == pytest.approx(first_token_s, rel=0.02)


def test_a_collector_that_does_not_answer_keeps_nobody_from_ending(monkeypatch):
    monkeypatch.setattr(otlp, "_CLOSE_S", 0.01)
    asked, released = threading.Event(), threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            asked.set()
            released.wait(10)
            return SpanExportResult.FAILURE

    sender = SpanSender("http://nowhere", "router-0", Silent())
    sender.send(TRACED)
    began = time.monotonic()
    try:
        sender.close()
        assert asked.wait(10)
    finally:
        released.set()
    assert time.monotonic() - began < 9
