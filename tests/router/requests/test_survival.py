"""Circuit breakers of nodes and pairs, and the budget of further attempts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InternalError, NodeUnavailable, TransferTimeout
from baton.messages import Adopted, End, HandedOff, Load, Prefill, SampleEnd, Tokens
from baton.node_info import NodeRole
from baton.sampling import FinishReason, SamplingParams
from router.placement.circuit_breakers import FIRST_OUT_S, LAST_OUT_S, MAX_FAILURES, TRIAL_S, WINDOW_S, CircuitBreakers
from router.requests.request_state import RoutedRequest
from router.requests.retry_budget import MEMORY_S, MIN_PER_S, SHARE, RetryBudget
from tests.router.rig import RouterRig, info

FLOOR = int(MIN_PER_S * MEMORY_S)


def opened(key: str = "k", now: float = 0.0) -> CircuitBreakers[str]:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    for _ in range(MAX_FAILURES):
        assert not breakers.is_out(key, now)
        breakers.failed(key, "why", now)
    assert breakers.why_out(key, now) == "why"
    return breakers


def test_what_fails_is_out_for_longer_each_time_and_tried_again() -> None:
    breakers, now, out_s = opened(), 0.0, FIRST_OUT_S
    for _ in range(8):
        breakers.failed("k", "why", now)  # of a request that was placed before
        assert breakers.why_out("k", now + out_s - 0.1) == "why"
        now, out_s = now + out_s, min(2 * out_s, LAST_OUT_S)
        assert not breakers.is_out("k", now)
        breakers.failed("k", "why", now)
    breakers.worked("k")
    breakers.failed("k", "why", now)
    assert not breakers.is_out("k", now)


def test_one_request_at_a_time_is_a_trial() -> None:
    breakers, now = opened(), FIRST_OUT_S
    assert not breakers.is_out("k", now)
    breakers.placed("k", now)
    assert breakers.is_out("k", now), "for all others"
    assert not breakers.is_out("k", now + TRIAL_S), "nothing was heard of the trial"
    breakers.placed("k", now + TRIAL_S)
    breakers.failed("k", "again", now + TRIAL_S + 0.1)
    assert breakers.is_out("k", now + TRIAL_S + 2 * FIRST_OUT_S)
    now += TRIAL_S + 2 * FIRST_OUT_S + 0.2
    breakers.placed("k", now)
    breakers.worked("k")
    assert not breakers.is_out("k", now)


def test_what_has_not_failed_lately_is_not_on_trial() -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    breakers.failed("k", "why", 0.0)
    breakers.placed("k", 1.0)
    assert not breakers.is_out("k", 1.0)


def test_rare_failures_make_no_row() -> None:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    for i in range(9):
        breakers.failed("k", "why", i * (WINDOW_S + 1))
        assert not breakers.is_out("k", i * (WINDOW_S + 1))


def test_what_is_gone_or_failed_long_ago_is_forgotten() -> None:
    breakers = opened("old")
    breakers.failed("gone", "why", WINDOW_S)
    breakers.forget(lambda key: key == "gone")
    assert len(breakers) == 1
    breakers.failed("new", "why", 1000.0)
    assert len(breakers) == 1


# ---- nodes ----


def ask(rig: RouterRig, name: str, now: float = 1.0, max_tokens: int = 8) -> tuple[str, Prefill]:
    rig.core.submit(RoutedRequest(name, (1, 2, 3), 1, SamplingParams(max_tokens=max_tokens), 60.0), now)
    rig.collect()
    return rig.prefills[-1]


def targets(rig: RouterRig, name: str, now: float = 1.0) -> tuple[str, str | None]:
    where, prefill = ask(rig, name, now)
    return where, prefill.decode.incarnation if prefill.decode else None


def fail(rig: RouterRig, name: str, now: float = 1.0) -> None:
    where, prefill = ask(rig, name, now)
    rig.say(where, prefill, End(InternalError("CUDA error")), now=now)


def test_a_prefill_node_that_fails_every_request_is_left_alone() -> None:
    rig = RouterRig("p1", "p2", "d1")
    for name in range(MAX_FAILURES):
        fail(rig, str(name))
    assert {targets(rig, f"more-{i}")[0] for i in range(4)} == {"p2"}
    assert str(rig.core.pool.why_degraded(1.0)).startswith("p1 is avoided for a while, since it fails: CUDA error")


def test_without_another_prefill_node_the_decode_nodes_do_its_work_until_a_trial_succeeds() -> None:
    rig = RouterRig("p1", "d1")
    for name in range(MAX_FAILURES):
        fail(rig, str(name))
    assert targets(rig, "a") == ("d1", None)
    now = 1.0 + FIRST_OUT_S
    where, trial = ask(rig, "trial", now)
    assert where == "p1"
    assert targets(rig, "b", now) == ("d1", None), "while the trial runs"
    rig.say("p1", trial, Tokens(0, 0, (5,)), HandedOff(0.1), now=now)
    rig.say("d1", trial, Adopted(0.1, 0, 9), now=now)
    assert targets(rig, "c", now) == ("p1", "d1")
    assert rig.core.pool.why_degraded(now) is None


ONE_TOKEN = (Tokens(0, 0, (5,)), SampleEnd(0, FinishReason.LENGTH), End())


def test_an_answer_that_ends_with_its_first_token_is_a_prefill_nodes_success() -> None:
    """As all are where prompts are scored: failures among them are not in a row, and one of them may be the trial."""
    rig = RouterRig("p1", "d1")
    for number in range(2 * MAX_FAILURES):
        fail(rig, f"fails-{number}")
        where, prefill = ask(rig, f"works-{number}", max_tokens=1)
        rig.say(where, prefill, *ONE_TOKEN)
        assert where == "p1"
    for number in range(MAX_FAILURES):
        fail(rig, f"in-a-row-{number}")
    now = 1.0 + FIRST_OUT_S
    where, trial = ask(rig, "trial", now, max_tokens=1)
    assert targets(rig, "meanwhile", now) == ("d1", None)
    rig.say(where, trial, *ONE_TOKEN, now=now)
    assert targets(rig, "after", now) == ("p1", "d1")


def test_a_request_that_a_decode_node_never_hears_of_is_no_trial_of_it_or_of_its_pair() -> None:
    rig = RouterRig("p1", "d1", "d2")
    rig.core.node_lost("d2", "away", 0.0)
    for _ in range(MAX_FAILURES):
        rig.core.pool.failed("d1", "CUDA error", 1.0)
        rig.core.pool.pair_breakers.failed(("p1", "d1"), "no KV", 1.0)
    now = 1.0 + FIRST_OUT_S
    assert [ask(rig, str(i), now, max_tokens=1)[0] for i in range(2)] == ["p1", "p1"]
    rig.core.node_up(info("d2", NodeRole.DECODE), now)
    assert {targets(rig, f"more-{i}", now)[1] for i in range(4)} == {"d1", "d2"}


def test_a_decode_node_that_fails_gets_requests_only_if_there_is_no_other() -> None:
    rig = RouterRig("p1", "d1", "d2")
    for name in range(MAX_FAILURES):
        rig.core.pool.failed("d1", "CUDA error", 1.0)
        assert targets(rig, str(name))
    assert {targets(rig, f"more-{i}")[1] for i in range(3)} == {"d2"}
    rig.core.node_lost("d2", "died", 1.0)
    assert targets(rig, "last") == ("p1", "d1")


def test_a_node_that_is_lost_each_time_it_comes_is_avoided_when_it_comes_again() -> None:
    rig = RouterRig("p2", "d1")
    for i in range(MAX_FAILURES):
        again = info("p1", NodeRole.PREFILL)
        rig.core.node_up(again, i)
        rig.core.node_lost("p1", "broke", i)
    rig.core.node_up(again, 3.0)
    assert {targets(rig, str(i), 3.0)[0] for i in range(4)} == {"p2"}


# ---- the budget ----


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=300))
def test_attempts_beyond_the_first_are_a_share_of_the_requests(steps: list[tuple[float, bool]]) -> None:
    budget, now, num_requests, num_taken = RetryBudget(), 0.0, 0, 0
    for waited_s, retried in steps:
        now += waited_s
        if retried:
            num_taken += budget.take(now)
        else:
            budget.request(now)
            num_requests += 1
    assert num_taken <= FLOOR + MIN_PER_S * now + SHARE * num_requests


def test_a_budget_that_is_used_up_recovers() -> None:
    budget = RetryBudget()
    assert sum(budget.take(0.0) for _ in range(1000)) == FLOOR
    assert not budget.take(0.05)
    assert 5 <= sum(budget.take(1.0) for _ in range(100)) <= 10
    for _ in range(500):
        budget.request(1.0)
    assert sum(budget.take(1.0) for _ in range(1000)) == pytest.approx(500 * SHARE, abs=1)


def test_a_request_ends_with_its_error_when_too_many_are_tried_again() -> None:
    rig = RouterRig("p1", "p2", "p3", "d1")
    for i in range(FLOOR + 200):
        where, prefill = ask(rig, str(i))
        rig.say(where, prefill, End(TransferTimeout("late")))
        if rig.emitted:
            break
        rig.core.cancel(str(i), 1.0)
        rig.emitted.clear()
        rig.collect()
        rig.emitted.clear()
    assert FLOOR <= i <= FLOOR * (1 + 2 * SHARE)
    assert isinstance(rig.end, TransferTimeout)
    assert rig.end.message == "late; not tried again, since too many requests are"


def test_each_answer_that_is_tried_again_takes_its_share() -> None:
    """What had tokens goes on in an attempt of its own."""
    rig = RouterRig("d1", with_prefill=False)
    prefill = rig.submit(n=FLOOR)
    rig.say("d1", prefill, *(Tokens(sample, 0, (5,)) for sample in range(FLOOR)), End(TransferTimeout("late")))
    assert len(rig.prefills) == 1 + FLOOR
    where, other = ask(rig, "other")
    rig.say(where, other, End(TransferTimeout("late")))
    assert isinstance(rig.end, TransferTimeout)
    assert rig.end.message == "late; not tried again, since too many requests are"


def test_what_a_node_refuses_that_stops_all_goes_on() -> None:
    """Hundreds of short prompts may wait for a decode node, and all be refused within a second."""
    rig = RouterRig("p1", "d1", "d2")
    prefills = [ask(rig, str(i))[1] for i in range(4 * FLOOR)]
    refused = [prefill for prefill in prefills if prefill.decode and prefill.decode.incarnation == "d1"]
    assert len(refused) > FLOOR * (1 + 4 * SHARE)
    rig.core.node_load("d1", Load(draining=True), 1.0)
    for prefill in refused:
        rig.say("p1", prefill, End(NodeUnavailable("the decode node is stopping")))
    assert not rig.emitted
    assert len(rig.prefills) == len(prefills) + len(refused)


@pytest.mark.parametrize("stops", ["p1", "d1"])
def test_what_a_node_refuses_that_stops_may_go_on_at_the_other_one(stops: str) -> None:
    """It has blocks of the prompt."""
    rig = RouterRig("p1", "d1")
    prefill = rig.submit()
    rig.core.node_up(info("p2", NodeRole.PREFILL), 1.0)
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    rig.core.node_load(stops, Load(draining=True), 1.0)
    rig.say("p1", prefill, End(NodeUnavailable("it is stopping")))
    where, again = rig.prefills[-1]
    assert again.decode
    assert (where, again.decode.incarnation) == {"p1": ("p2", "d1"), "d1": ("p1", "d2")}[stops]


def test_streams_of_a_lost_node_all_go_on() -> None:
    rig = RouterRig("p1", "d1", "d2")
    prefills = [ask(rig, str(i))[1] for i in range(4 * FLOOR)]
    lost = [prefill for prefill in prefills if prefill.decode and prefill.decode.incarnation == "d1"]
    assert len(lost) > FLOOR
    rig.core.node_lost("d1", "died", 1.0)
    rig.collect()
    assert not rig.emitted
    assert len(rig.prefills) == len(prefills) + len(lost)
