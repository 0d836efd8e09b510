"""What the router's state machine notes of a request, and the timeline that its end has."""

import pytest

from baton.messages import Adopted, End, HandedOff, SampleEnd, Started, Tokens
from baton.node_info import NodeRole
from baton.node_times import DecodeTimes, PromptTimes
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry.timeline import Estimate, Timeline, first_token_stages
from router.requests.request_record import MAX_RECORDED_ATTEMPTS, Preparation, RequestRecord
from router.requests.request_state import RoutedRequest
from tests.router.rig import RouterRig, info

ENDED = (SampleEnd(0, FinishReason.LENGTH), End(None, None, DecodeTimes(2, 0.5)))
PROMPT = PromptTimes(0.1, 0.5, 2, granted_s=0.6)
ADOPTED = Adopted(0.05, 0, 64, commit_s=0.1, step_wait_s=0.02)
PREPARED = Preparation(1_700_000_000.0, 0.01, 0.04)


def submit(rig: RouterRig, submitted: float = 0.05, n: int = 1):
    request = RoutedRequest("r", (1, 2, 3), n, SamplingParams(max_tokens=8), 60.0, preparation=PREPARED)
    rig.core.submit(request, submitted, 0.0)
    rig.collect()
    return rig.prefills[-1][1] if rig.prefills else None


def timeline_of(rig: RouterRig) -> Timeline:
    timeline = rig.last_word.timeline
    assert timeline is not None
    return timeline


def test_a_request_of_a_pair_has_each_moment():
    rig = RouterRig("p", "d")
    prefill = submit(rig)
    rig.say("p", prefill, Started(0, 0.1), now=0.2)
    rig.say("p", prefill, Tokens(0, 0, (5,)), now=0.7)
    rig.say("p", prefill, HandedOff(0.4, 0.1, 0.1, PROMPT), now=0.9)
    rig.say("d", prefill, ADOPTED, Tokens(0, 1, (6,)), now=1.0)
    rig.say("d", prefill, *ENDED, now=1.5)
    timeline = timeline_of(rig)
    (attempt,) = timeline.attempts
    assert (attempt.placed_at_s, attempt.started_at_s, attempt.handed_off_at_s) == (0.05, 0.2, 0.9)
    assert (attempt.adopted_at_s, attempt.ended_at_s) == (1.0, 1.5)
    assert (attempt.prefill_node, attempt.decode_node, attempt.estimate.kind) == ("p", "d", "pair")
    assert attempt.estimate.policy == "least-loaded"
    assert (attempt.prompt, attempt.adopted, attempt.decode) == (PROMPT, ADOPTED, DecodeTimes(2, 0.5))
    assert (timeline.first_token_at_s, timeline.ended_at_s, timeline.num_output_tokens) == (0.7, 1.5, 2)
    found = {name: round(seconds, 9) for name, seconds in first_token_stages(timeline).items()}
    assert found["network"] == pytest.approx(0.05)
    assert (found["receive"], found["tokenize"], found["place"]) == (0.01, 0.03, 0.01)


def test_a_first_token_that_the_decode_node_streams_has_the_handoff_in_it():
    rig = RouterRig("p", "d", first_token="decode")
    prefill = submit(rig)
    rig.say("p", prefill, Started(0, 0.1), now=0.2)
    rig.say("p", prefill, Tokens(0, 0, (5,)), HandedOff(0.4, 0.1, 0.1, PROMPT), now=0.7)
    rig.say("d", prefill, ADOPTED, now=0.8)
    rig.say("d", prefill, Tokens(0, 1, (6,)), *ENDED, now=1.5)
    found = first_token_stages(timeline_of(rig))
    assert sum(found.values()) == pytest.approx(0.8)
    assert (found["transfer"], found["step_wait"]) == (0.05, 0.02)


def test_a_decode_node_alone_reports_its_prompt_with_the_end():
    rig = RouterRig("d", with_prefill=False)
    prefill = submit(rig)
    rig.say("d", prefill, Started(0, 0.1), now=0.2)
    rig.say("d", prefill, Tokens(0, 0, (5,)), now=0.7)
    rig.say("d", prefill, SampleEnd(0, FinishReason.STOP), End(None, PROMPT, DecodeTimes(1, 0.0)), now=1.0)
    timeline = timeline_of(rig)
    assert timeline.attempts[0].estimate.kind == "decode_alone"
    assert first_token_stages(timeline)["prefill"] == pytest.approx(0.4)


def test_an_attempt_that_was_lost_is_in_the_timeline_of_the_next_one():
    rig = RouterRig("p", "d", "p2")
    first = submit(rig)
    (lost, _) = rig.prefills[-1]
    rig.say(lost, first, Started(0, 0.1), now=0.2)
    rig.core.node_lost(lost, "gone", 2.0)
    rig.collect()
    other, again = rig.prefills[-1]
    rig.say(other, again, Started(0, 0.1), now=2.2)
    rig.say(other, again, Tokens(0, 0, (5,)), HandedOff(0.4, prompt=PROMPT), now=2.7)
    rig.say("d", again, ADOPTED, Tokens(0, 1, (6,)), *ENDED, now=3.0)
    timeline = timeline_of(rig)
    assert [attempt.attempt for attempt in timeline.attempts] == [0, 1]
    assert "gone" in timeline.attempts[0].error
    assert (timeline.attempts[0].ended_at_s, timeline.attempts[1].placed_at_s) == (2.0, 2.0)
    assert timeline.first_attempt == 1
    assert first_token_stages(timeline)["retry"] == pytest.approx(1.95)


def test_a_request_that_waits_for_a_node_says_for_how_long():
    rig = RouterRig()
    submit(rig)
    rig.core.node_up(info("d", NodeRole.DECODE), 5.0)
    rig.collect()
    prefill = rig.prefills[-1][1]
    rig.say("d", prefill, Started(0, 0.1), now=5.2)
    rig.say("d", prefill, Tokens(0, 0, (5,)), *ENDED, now=5.7)
    assert first_token_stages(timeline_of(rig))["wait_for_node"] == pytest.approx(4.95)


def test_a_request_that_never_ran_has_a_timeline_too():
    rig = RouterRig()
    submit(rig)
    rig.core.cancel("r", 1.0)
    rig.collect()
    timeline = timeline_of(rig)
    assert (timeline.attempts, timeline.error_code, timeline.ended_at_s) == ((), "cancelled", 1.0)


def test_the_record_of_a_request_is_bounded():
    record = RequestRecord()
    for number in range(MAX_RECORDED_ATTEMPTS + 5):
        record.placed(number, (0,), ("p", "d"), Estimate("cost", "pair", 0.0, 0.0, 0.0, 0, 0.0), 1.0)
    assert (len(record.attempts), record.num_attempts) == (MAX_RECORDED_ATTEMPTS, MAX_RECORDED_ATTEMPTS + 5)
