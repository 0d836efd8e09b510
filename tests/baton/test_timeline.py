"""Stages of the time to first token that add up, the ring of timelines, and the W3C trace context."""

import dataclasses
import sys
from typing import Any

import pytest

from baton.messages import Adopted, HandedOff
from baton.node_times import DecodeTimes, Gap, PromptTimes
from baton.telemetry.timeline import STAGES, AttemptTimeline, Estimate, Timeline, first_token_stages
from baton.telemetry.timeline_json import describe
from baton.telemetry.timeline_ring import TimelineRing
from baton.telemetry.trace_context import TraceContext, begin

WHY = Estimate("cost", "pair", 0.1, 0.5, 0.02, 0, 0.9)
ATTEMPT = AttemptTimeline(
    attempt=0,
    samples=(0,),
    prefill_node="p-0",
    decode_node="d-0",
    estimate=WHY,
    placed_at_s=0.05,
    started_at_s=0.17,
    queue_s=0.1,
    prompt=PromptTimes(0.1, 0.6, 2, granted_s=0.65),
)
TIMELINE = Timeline(
    request_id="mine.1f",
    model="m",
    received_at=1_700_000_000.0,
    read_at_s=0.01,
    tokenized_at_s=0.04,
    submitted_at_s=0.045,
    first_token_at_s=0.75,
    ended_at_s=2.0,
    num_prompt_tokens=100,
    num_output_tokens=10,
    num_samples=1,
    attempts=(ATTEMPT,),
    first_attempt=0,
    num_attempts=1,
)


def with_attempt(**changes: Any) -> Timeline:
    return dataclasses.replace(TIMELINE, attempts=(dataclasses.replace(ATTEMPT, **changes),))


def stages(timeline: Timeline) -> dict[str, float]:
    return {name: round(seconds, 9) for name, seconds in first_token_stages(timeline).items()}


def test_what_no_process_accounts_for_is_the_network():
    assert stages(TIMELINE) == {
        "receive": 0.01,
        "tokenize": 0.03,
        "place": 0.005,
        "wait_for_node": 0.005,
        "queue": 0.1,
        "prefill": 0.5,
        "reserve": 0.05,
        "network": 0.05,
    }


def test_the_time_of_attempts_that_failed_is_a_stage():
    lost = dataclasses.replace(ATTEMPT, error="lost", prompt=None)
    again = dataclasses.replace(ATTEMPT, attempt=1, placed_at_s=3.05, started_at_s=3.2)
    twice = dataclasses.replace(TIMELINE, attempts=(lost, again), first_attempt=1, first_token_at_s=3.75)
    assert stages(twice)["retry"] == 3.0
    assert sum(first_token_stages(twice).values()) == pytest.approx(3.75)


def test_a_prefill_that_is_not_reported_is_what_the_router_saw():
    found = stages(with_attempt(prompt=None))
    assert found["prefill"] == pytest.approx(0.75 - 0.17)
    assert found["network"] == pytest.approx(0.02), "the way there and back of what the router saw first"


def test_a_first_token_of_the_decode_node_waits_for_the_handoff():
    handed_over = with_attempt(adopted=Adopted(0.03, 0, 1, commit_s=0.01, step_wait_s=0.02), adopted_at_s=0.75)
    waiting = dataclasses.replace(handed_over, first_waits_for_decode=True)
    found = stages(waiting)
    assert (found["reserve"], found["transfer"], found["step_wait"]) == (0.01, 0.03, 0.02)
    search = dataclasses.replace(waiting, first_token_at_s=0.95)
    assert stages(search)["decode"] == 0.2, "a beam search has its first token at its end"
    assert "transfer" not in stages(handed_over), "the prefill node's message brought the token"


@pytest.mark.parametrize("queue_s", [0.0, 0.4, 5.0])
def test_stages_add_up_whatever_a_node_reports(queue_s):
    found = first_token_stages(with_attempt(queue_s=queue_s))
    assert sum(found.values()) == pytest.approx(0.75)
    assert min(found.values()) >= 0
    assert list(found) == [name for name in STAGES if name in found]


def test_a_request_without_a_token_has_no_stages():
    assert first_token_stages(dataclasses.replace(TIMELINE, first_token_at_s=0.0, first_attempt=None)) == {}


def test_a_timeline_says_whether_a_decode_node_alone_would_have_been_faster():
    assert describe(TIMELINE)["decode_alone"] == {"expected_first_token_s": 0.95, "would_be_faster": False}
    slow = dataclasses.replace(TIMELINE, first_token_at_s=1.2)
    assert describe(slow)["decode_alone"]["would_be_faster"]
    alone = with_attempt(estimate=WHY._replace(kind="decode_alone"))
    assert describe(alone)["decode_alone"] is None


def test_a_description_has_each_report_once():
    times = DecodeTimes(3, 0.2, (Gap(1, 0.15),))
    (shown,) = describe(with_attempt(handed_off=HandedOff(0.5, prompt=ATTEMPT.prompt), decode=times))["attempts"]
    assert shown["prompt"]["num_chunks"] == 2
    assert shown["handed_off"] == {"prefill_s": 0.5, "gather_s": 0.0, "wire_s": 0.0}
    assert shown["decode"]["longest"] == [{"step": 1, "gap_s": 0.15}]


def named(name: str) -> Timeline:
    return dataclasses.replace(TIMELINE, request_id=name)


def test_the_ring_keeps_the_newest_that_fit():
    ring = TimelineRing(3 * TIMELINE.size_bytes)
    for serial in range(5):
        ring.add(named(f"many.{serial}"))
    assert [kept.request_id for kept in ring.newest(10)] == ["many.4", "many.3", "many.2"]
    assert [kept.request_id for kept in ring.newest(1)] == ["many.4"]
    assert [kept.request_id for kept in ring.find("many")] == ["many.4", "many.3", "many.2"]
    assert [kept.request_id for kept in ring.find("many.3")] == ["many.3"]
    assert not ring.find("many.1"), "the ring has forgotten it"


def test_a_ring_of_no_bytes_keeps_nothing():
    ring = TimelineRing(0)
    ring.add(TIMELINE)
    assert len(ring) == 0


def deep_size(value: object, seen: set[int]) -> int:
    if id(value) in seen or value is None or isinstance(value, type):
        return 0
    seen.add(id(value))
    inner = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    inner += list(value) if isinstance(value, tuple) else []
    return sys.getsizeof(value) + sum(deep_size(one, seen) for one in inner)


def test_a_timeline_takes_no_more_than_it_counts_for():
    full = with_attempt(
        error="e" * 500,
        handed_off=HandedOff(0.1, 0.2, 0.3, PromptTimes(*(float(i) for i in range(8)))),  # type: ignore[arg-type]
        adopted=Adopted(0.11, 2**40, 2**40, 0.12, 0.13, 0.14),
        decode=DecodeTimes(1000, 1.1, tuple(Gap(i + 1000, i + 0.5) for i in range(4))),
        samples=tuple(range(1000, 1064)),
    )
    assert TIMELINE.size_bytes / 4 < deep_size(TIMELINE, set()) <= TIMELINE.size_bytes
    assert deep_size(full, set()) <= full.size_bytes


def test_a_trace_goes_on_where_the_caller_began_it():
    trace = begin("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    assert (trace.trace_id, trace.parent_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert trace.sampled
    assert trace.header == f"00-0af7651916cd43dd8448eb211c80319c-{trace.span_id:016x}-01"
    assert trace.span_id not in (0, trace.parent_id)


@pytest.mark.parametrize(
    ("header", "sampled"),
    [("00-" + "1" * 32 + "-" + "2" * 16 + "-00", False), ("01-" + "1" * 32 + "-" + "2" * 16 + "-01-x", True)],
)
def test_flags_and_later_versions_are_read(header, sampled):
    trace = begin(header)
    assert trace.parent_id
    assert trace.sampled is sampled


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "junk",
        "ff-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "00-" + "0" * 32 + "-" + "2" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "2" * 16 + "-01-more",
        "00-" + "A" * 32 + "-" + "2" * 16 + "-01",
    ],
)
def test_a_header_that_is_absent_or_wrong_begins_a_new_trace(header):
    first, second = begin(header), begin(header, sampled=False)
    assert first.trace_id != second.trace_id
    assert first.trace_id
    assert (first.parent_id, first.sampled, second.sampled) == (0, True, False)
    assert TraceContext(1, 2).header == "00-" + "0" * 31 + "1-" + "0" * 15 + "2-01"
