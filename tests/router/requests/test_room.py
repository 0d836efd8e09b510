"""A decode node's free blocks are credits: what it has no room for waits at the router, in order, and is not lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded
from baton.messages import Adopted, HandedOff, Load, Started, Tokens
from baton.node_info import NodeRole
from router.requests.admission import LONGEST_RETRY_AFTER_S, Full
from router.requests.request_state import AttemptState
from tests.router.requests.room import LONG, load, placed, submit
from tests.router.rig import RouterRig, info


def adopt(rig: RouterRig, name: str) -> None:
    (prefill,) = [p for _, p in rig.prefills if p.attempt_id.request_id == name]
    rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.1))
    rig.say("d1", prefill, Adopted(0.0, 0, 0))


def test_a_prefill_node_gets_no_more_than_the_decode_node_can_take() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 10)
    for name in "abcde":
        submit(rig, name)
    assert placed(rig) == ["a", "b", "c"], "3 of 9 blocks each"
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c"], "which are still to come"
    rig.say("p1", rig.prefills[0][1], Started(0, 0.0))
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c"], "nor has it what the prefill node computes"
    adopt(rig, "a")
    load(rig, 9, "p1")
    assert placed(rig) == ["a", "b", "c"], "its blocks are still counted: the last load was before"
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c", "d"]
    assert rig.core.states().count(AttemptState.UNPLACED) == 1


def test_answers_of_one_token_need_no_room_on_a_decode_node() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    submit(rig, "a", 101 * 16, max_tokens=1)
    assert placed(rig) == ["a"]
    assert rig.core.pool.get("d1").num_promised == 0


def test_after_a_loss_room_is_needed_for_the_output_too() -> None:
    """32 tokens of prompt and 40 of output take 5 blocks, and one for the next token."""
    rig = RouterRig("p1", "d1")
    submit(rig, "a", max_tokens=64)
    ((_, prefill),) = rig.prefills
    adopt(rig, "a")
    rig.say("d1", prefill, *(Tokens(0, 1 + i, (7,)) for i in range(39)))
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    rig.core.node_load("d2", Load(0, 1, 6, 100), 1.0)
    rig.core.node_lost("d1", "gone", 1.0)
    rig.collect()
    assert len(rig.prefills) == 1, "it has 6 blocks, of which the request that runs there needs one"
    rig.core.node_load("d2", Load(0, 1, 7, 100), 1.0)
    rig.collect()
    assert [len(p.prompt_tokens) + sum(len(s.output_tokens) for s in p.samples) for _, p in rig.prefills] == [32, 72]


def test_what_is_given_up_gives_its_credits_back() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 4)
    submit(rig, "a")
    submit(rig, "b")
    rig.core.cancel("a", 1.0)
    load(rig, 4)
    assert placed(rig) == ["a", "b"]


def test_another_decode_node_with_room_is_chosen() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 1)
    load(rig, 4, "d2")
    submit(rig, "a")
    (prefill,) = [p for _, p in rig.prefills]
    assert prefill.decode
    assert prefill.decode.incarnation == "d2"


def target(rig: RouterRig) -> str:
    """Of what was placed last."""
    decode = rig.prefills[-1][1].decode
    assert decode
    return decode.incarnation


@pytest.mark.parametrize("whose", ["this router's", "another router's"])
def test_a_node_with_a_seat_is_chosen_if_there_is_one(whose: str) -> None:
    """d1 may run four answers at a time. It has four short ones, and d2 one that is longer than these together."""
    rig = RouterRig("p1", "d1", "d2")
    rig.core.drain_node("d1", True, 0.0)
    submit(rig, "long", 20 * 16)
    rig.core.drain_node("d1", False, 0.0)
    if whose == "this router's":
        for name in "abcd":
            submit(rig, name, 3)
            assert target(rig) == "d1"
    load(rig, 90, "d2")
    rig.core.node_load("d1", Load(0, 0 if whose == "this router's" else 4, 90, 100), 0.0)
    for name in "efg":
        submit(rig, name, 3)
        assert target(rig) == "d2", "it would wait for a seat"
    submit(rig, "h", 3)
    assert target(rig) == "d1", "none has a seat, and it has less to do"
    rig.core.cancel("e", 1.0)
    submit(rig, "i", 3)
    assert target(rig) == "d2"


def test_a_seat_is_of_no_use_without_room() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 1)
    rig.core.node_load("d2", Load(0, 4, 90, 100), 0.0)
    submit(rig, "a")
    assert target(rig) == "d2"


def test_the_first_of_several_nodes_that_come_does_not_get_all_that_waits() -> None:
    """Its loads say what it has done with it only later."""
    rig = RouterRig("p1")
    for i in range(9):
        submit(rig, f"r{i}")
    for name in ("d1", "d2"):
        rig.core.node_up(info(name, NodeRole.DECODE), 1.0)
    rig.collect()
    targets = [prefill.decode.incarnation for _, prefill in rig.prefills if prefill.decode]
    assert targets == ["d1"] * 3 + ["d2"] * 3, "with three blocks each"
    rig.core.node_load("d1", Load(0, 0, 9, 9), 1.1)
    submit(rig, "behind")
    assert len(rig.prefills) == 6, "they are promised"


def test_an_idle_node_gets_what_it_may_refuse_itself() -> None:
    rig = RouterRig("p1", "d1")
    rig.core.node_load("d1", Load(0, 0, 1, 9), 0.0)
    submit(rig, "a")
    submit(rig, "b")
    assert placed(rig) == ["a"]


def test_a_decode_node_without_prefill_nodes_queues_by_itself() -> None:
    rig = RouterRig("d1", with_prefill=False)
    load(rig, 0)
    submit(rig, "a")
    assert placed(rig) == ["a"]


def test_a_short_request_does_not_overtake_a_long_one_that_waits() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 3)
    submit(rig, "long")
    submit(rig, "short", 3)
    assert placed(rig) == []
    load(rig, 10)
    assert placed(rig) == ["long", "short"]


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 30)), max_size=8))
def test_they_are_placed_in_the_order_in_which_they_are_due(wanted: Sequence[tuple[int, int]]) -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    arrivals = sorted(enumerate(wanted), key=lambda one: one[1][1])
    for number, (priority, at_s) in arrivals:
        submit(rig, str(number), priority=priority, now=float(at_s))
    assert placed(rig) == []
    load(rig, 100, now=40.0)
    due = sorted(arrivals, key=lambda one: one[1][1] + 10 * one[1][0])
    assert placed(rig) == [str(number) for number, _ in due]
    ages = {prefill.attempt_id.request_id: prefill.age_s for _, prefill in rig.prefills}
    assert ages == {str(number): 40.0 - at_s for number, (_, at_s) in arrivals}


def test_waiting_is_bounded_by_tokens_and_says_when_to_come_again() -> None:
    rig = RouterRig("p1", "d1", max_waiting=0, max_waiting_tokens=2 * (LONG + 8))
    load(rig, 0)
    submit(rig, "a")
    submit(rig, "b")
    with pytest.raises(Full, match=r"80 of 80 tokens wait for decode nodes \(--max-waiting-tokens\)") as full:
        submit(rig, "c")
    assert full.value.retry_after_s == 1
    load(rig, 4, now=20.0)
    assert placed(rig) == ["a"], "after 20 s"
    submit(rig, "c", now=20.0)
    with pytest.raises(Full) as full:
        submit(rig, "d", now=20.0)
    assert full.value.retry_after_s == 10, "half of what waits is to leave"
    assert full.value.retry_after_s <= LONGEST_RETRY_AFTER_S
    assert len(rig.core.requests) == 3


def test_one_that_was_taken_waits_again_however_many_do() -> None:
    rig = RouterRig("p1", "d1", "d2", max_waiting=0, max_waiting_tokens=1)
    load(rig, 4)
    load(rig, 0, "d2")
    submit(rig, "a")
    submit(rig, "b", now=0.5)
    rig.core.node_lost("d1", "died", 1.0)
    rig.collect()
    assert len(rig.core.requests) == 2
    load(rig, 100, "d2", now=2.0)
    assert placed(rig) == ["a", "a", "b"]


def test_one_that_finds_no_room_in_time_is_told_so() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    submit(rig, "a")
    rig.core.tick(60.0)
    rig.collect()
    assert isinstance(rig.end, DeadlineExceeded)
    assert "no room on the decode nodes within 60 s" in rig.end.message
