"""How an attempt ends, what of it still counts, and what the next one is: the router's rules, one at a time."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import (
    BatonError,
    CacheExhausted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    PeerLost,
    RequestCancelled,
    TransferError,
)
from baton.messages import Abort, Adopted, End, HandedOff, NodeRole, Prefill, SampleEnd, TokenLogprobs, Tokens
from baton.sampling import FinishReason, SamplingParams
from router.actions import ToNode
from router.life import AttemptState, RoutedRequest, TokensOut
from tests.router.house import House, info

ADOPTED = Adopted(0.1, 0, 9)
HANDED_OFF = HandedOff(0.1)
LENGTH = SampleEnd(0, FinishReason.LENGTH)


def handed_over(*names: str) -> tuple[House, Prefill]:
    """A house with a request that p1 has handed to d1, which has adopted it."""
    house = House("p1", "d1", *names)
    prefill = house.submit()
    house.say("p1", prefill, Tokens(0, 0, (5,)), HANDED_OFF)
    house.say("d1", prefill, ADOPTED)
    return house, prefill


def aborts(house: House) -> list[tuple[str, tuple[int, ...]]]:
    """(node, samples) of each Abort so far."""
    return [(a.incarnation, a.message.samples) for a in house.sent if isinstance(a.message, Abort)]


# ---- whose words count ----


def test_a_node_that_the_attempt_was_not_placed_on_is_not_heard() -> None:
    house = House("p1", "d1", "p2", "d2")
    prefill = house.submit()
    for stranger in ("p2", "d2"):
        house.say(stranger, prefill, Tokens(0, 0, (5,)), End(InternalError("not yours")))
    assert not house.emitted
    assert len(house.prefills) == 1


def test_an_attempt_that_is_over_is_not_heard() -> None:
    house = House("p1", "d1")
    first = house.submit()
    house.say("p1", first, End(TransferError("lost")))
    assert house.prefills[-1][1].attempt_id.attempt == 1
    house.say("p1", first, Tokens(0, 0, (5,)), End(InternalError("late")))
    assert not house.emitted
    house.say("p1", house.prefills[-1][1], Tokens(0, 0, (6,)))
    assert house.told == [(0, 6)]


def test_a_request_id_is_used_once_at_a_time() -> None:
    house = House("p1", "d1")
    prefill = house.submit()
    with pytest.raises(InvalidRequest, match="in use"):
        house.submit()
    house.say("p1", prefill, Tokens(0, 0, (5,)), LENGTH, End())
    assert house.end is None
    assert house.submit().attempt_id == prefill.attempt_id


# ---- tokens ----


def test_a_repeat_is_cut_off_with_its_logprobs() -> None:
    house = House("p1", "d1")
    prefill = house.submit()
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(4))
    house.say("p1", prefill, Tokens(0, 0, (5, 6), logprobs[:2]), Tokens(0, 0, (5, 6, 7, 8), logprobs))
    events = [e.event for e in house.emitted]
    assert events == [TokensOut(0, (5, 6), logprobs[:2]), TokensOut(0, (7, 8), logprobs[2:])]


def test_what_comes_next_does_not_wait_for_the_prefill_nodes_last_word() -> None:
    house = House("p1", "d1")
    prefill = house.submit()
    house.say("p1", prefill, Tokens(0, 0, (5,)))
    house.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)))
    assert house.told == [(0, 5), (0, 6)]


def test_an_end_that_overtakes_tokens_waits_for_them() -> None:
    house = House("p1", "d1")
    prefill = house.submit()
    house.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)), LENGTH, End())
    assert not house.emitted
    house.say("p1", prefill, Tokens(0, 0, (5,)))
    assert house.told == [(0, 5), (0, 6)]
    assert house.end is None
    assert ("p1", ()) in aborts(house), "its last word is still under way"


def test_an_end_with_tokens_missing_is_the_attempts_failure() -> None:
    house, prefill = handed_over()
    house.say("d1", prefill, Tokens(0, 1, (6,)), End())
    assert house.prefills[-1][1].samples[0].output_tokens == (5, 6)


def test_an_error_after_all_samples_ended_is_none() -> None:
    house, prefill = handed_over()
    house.say("d1", prefill, Tokens(0, 1, (6,)), LENGTH, End(InternalError("too late")))
    assert house.end is None
    assert house.core.num_requests == 0


# ---- stop strings ----


def test_a_stopped_sample_is_aborted_alone_and_the_attempt_with_its_last_one() -> None:
    house = House("p1", "d1")
    prefill = house.submit(n=2)
    house.say("p1", prefill, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)))
    house.core.stop_sample("r", 0, 2.0)
    house.collect()
    assert aborts(house) == [("p1", (0,)), ("d1", (0,))]
    house.core.stop_sample("r", 0, 2.0)
    house.core.stop_sample("r", 1, 2.0)
    house.collect()
    assert aborts(house)[2:] == [("p1", ()), ("d1", ())]
    assert house.end is None


# ---- nodes that are lost ----


@pytest.mark.parametrize(
    ("said", "by"), [(HANDED_OFF, "p1"), (ADOPTED, "d1")], ids=["adopted is missing", "its last word is missing"]
)
def test_until_both_have_spoken_a_lost_prefill_node_costs_the_attempt(said: object, by: str) -> None:
    house = House("p1", "d1", "p2")
    prefill = house.submit()
    house.say("p1", prefill, Tokens(0, 0, (5,)))
    house.say(by, prefill, said)
    house.core.node_lost("p1", "died", 2.0)
    house.collect()
    where, again = house.prefills[-1]
    assert (where, again.attempt_id.attempt, again.samples[0].output_tokens) == ("p2", 1, (5,))
    assert ("d1", ()) in aborts(house)


def test_a_prefill_node_that_is_lost_later_costs_nothing() -> None:
    house, prefill = handed_over("p2")
    house.core.node_lost("p1", "died", 2.0)
    house.say("d1", prefill, Tokens(0, 1, (6,)), LENGTH, End())
    assert len(house.prefills) == 1
    assert house.told == [(0, 5), (0, 6)]
    assert house.end is None


def test_a_lost_decode_node_costs_the_attempt_at_any_time() -> None:
    house, _ = handed_over("d2")
    house.core.node_lost("d1", "died", 2.0)
    house.collect()
    again = house.prefills[-1][1]
    assert again.attempt_id.attempt == 1
    assert again.decode
    assert again.decode.incarnation == "d2"
    assert house.core.states() == [AttemptState.QUEUED]


# ---- the next attempt ----


@pytest.mark.parametrize("error", [CacheExhausted, NodeUnavailable, TransferError, PeerLost])
def test_what_a_node_could_not_do_another_may(error: type[BatonError]) -> None:
    house = House("p1", "d1", "d2")
    house.say("p1", house.submit(), End(error("not here")))
    assert house.prefills[-1][1].attempt_id.attempt == 1


def test_four_attempts_are_enough() -> None:
    house = House("p1", "d1")
    house.submit()
    for _ in range(4):
        house.say("d1", house.prefills[-1][1], End(TransferError("damaged")))
    assert isinstance(house.end, TransferError)
    assert [prefill.attempt_id.attempt for _, prefill in house.prefills] == [0, 1, 2, 3]


def test_nodes_that_failed_earlier_attempts_are_all_avoided() -> None:
    house = House("p1", "d1", "d2", "d3")
    house.submit()
    asked = []
    for _ in range(3):
        target = house.prefills[-1][1].decode
        assert target
        asked.append(target.incarnation)
        house.say(target.incarnation, house.prefills[-1][1], End(TransferError("damaged")))
    assert sorted(asked) == ["d1", "d2", "d3"]


def test_a_retry_has_what_is_left_of_the_deadline() -> None:
    house = House("p1", "d1")
    first = house.submit()
    assert first.deadline_s == 60.0
    house.say("p1", first, End(TransferError("lost")), now=45.0)
    assert house.prefills[-1][1].deadline_s == 15.0


def test_a_sample_with_output_and_one_without_go_on_by_themselves() -> None:
    house = House("p1", "d1")
    first = house.submit(n=2)
    house.say("p1", first, Tokens(0, 0, (5,)), End(TransferError("lost")))
    again = [prefill for _, prefill in house.prefills[1:]]
    assert [(p.attempt_id.request_id, len(p.samples)) for p in again] == [("r/0", 1), ("r/1", 1)]


def test_nodes_whose_blocks_differ_are_no_pair() -> None:
    house = House("p1")
    other = info("d1", NodeRole.DECODE)
    house.core.node_up(dataclasses.replace(other, layout=dataclasses.replace(other.layout, block_size=32)), 0.0)
    reason = house.core.why_not_ready()
    assert reason
    assert "block_size 16 != 32" in reason
    house.core.node_up(info("d2", NodeRole.DECODE), 0.0)
    target = house.submit().decode
    assert target
    assert target.incarnation == "d2"


# ---- ends ----


def test_a_deadline_ends_the_request_at_that_very_time() -> None:
    house = House("p1", "d1")
    house.submit()
    assert house.core.next_deadline() == 60.0
    house.core.tick(59.9)
    house.collect()
    assert not house.emitted
    house.core.tick(60.0)
    house.collect()
    assert isinstance(house.end, DeadlineExceeded)
    assert aborts(house) == [("p1", ()), ("d1", ())]


def test_the_next_deadline_is_the_earliest() -> None:
    house = House("p1", "d1")
    for name, deadline_s in (("a", 60.0), ("b", 20.0), ("c", 90.0)):
        house.core.submit(RoutedRequest(name, (1, 2), 1, SamplingParams(), deadline_s), 0.0)
    assert house.core.next_deadline() == 20.0
    house.core.tick(20.0)
    assert house.core.next_deadline() == 60.0


def test_a_client_that_leaves_frees_both_nodes() -> None:
    house = House("p1", "d1")
    house.submit()
    house.core.cancel("r", 1.0)
    house.core.cancel("r", 1.0)
    house.collect()
    assert isinstance(house.end, RequestCancelled)
    assert aborts(house) == [("p1", ()), ("d1", ())]


def test_after_its_last_word_a_prefill_node_is_told_nothing_more() -> None:
    house, _ = handed_over()
    house.core.cancel("r", 1.0)
    house.collect()
    assert [a.incarnation for a in house.sent if isinstance(a, ToNode) and isinstance(a.message, Abort)] == ["d1"]
