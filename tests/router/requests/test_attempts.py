"""How an attempt ends, what of it still counts, and what the next one is: the router's rules, one at a time."""

from __future__ import annotations

import dataclasses

import pytest

from baton import wire
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
from baton.messages import Abort, Adopted, End, HandedOff, Load, Prefill, SampleEnd, TokenLogprobs, Tokens
from baton.node_info import NodeRole
from baton.sampling import FinishReason, SamplingParams
from router.requests.actions import ToNode
from router.requests.request_state import AttemptState, RoutedRequest
from tests.router.rig import RouterRig, info

ADOPTED = Adopted(0.1, 0, 9)
HANDED_OFF = HandedOff(0.1)
LENGTH = SampleEnd(0, FinishReason.LENGTH)


def handed_over(*names: str) -> tuple[RouterRig, Prefill]:
    """A rig with a request that p1 has handed to d1, which has adopted it."""
    rig = RouterRig("p1", "d1", *names)
    prefill = rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)), HANDED_OFF)
    rig.say("d1", prefill, ADOPTED)
    return rig, prefill


def aborts(rig: RouterRig) -> list[tuple[str, tuple[int, ...]]]:
    """(node, samples) of each Abort so far."""
    return [(a.incarnation, a.message.samples) for a in rig.sent if isinstance(a.message, Abort)]


def test_an_abort_of_what_was_late_from_the_start_states_its_deadline() -> None:
    """As of a prompt that was longer on its way here than its client waits. Without one, each would stay at the decode
    node for twice `--request-timeout`, and a million of them cost the router its session."""
    rig = RouterRig("p1", "d1")
    rig.core.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 0.01), 10.0, 9.9)
    rig.tick(10.0)
    assert rig.aborted == {"p1", "d1"}
    for action in rig.sent:
        if isinstance(action.message, Abort):
            read = wire.read_router_message(wire.write_router_message(action.message))
            assert isinstance(read, Abort)
            assert 0.0 < read.deadline_s < 1.0


# ---- whose words count ----


def test_a_node_that_the_attempt_was_not_placed_on_is_not_heard() -> None:
    rig = RouterRig("p1", "d1", "p2", "d2")
    prefill = rig.submit()
    for stranger in ("p2", "d2"):
        rig.say(stranger, prefill, Tokens(0, 0, (5,)), End(InternalError("not yours")))
    assert not rig.emitted
    assert len(rig.prefills) == 1


def test_an_attempt_that_is_over_is_not_heard() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.say("p1", first, End(TransferError("lost")))
    assert rig.prefills[-1][1].attempt_id.attempt == 1
    rig.say("p1", first, Tokens(0, 0, (5,)), End(InternalError("late")))
    assert not rig.emitted
    rig.say("p1", rig.prefills[-1][1], Tokens(0, 0, (6,)))
    assert rig.told == [(0, 6)]


def test_a_request_id_is_used_once_at_a_time() -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit()
    with pytest.raises(InvalidRequest, match="in use"):
        rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)), LENGTH, End())
    assert rig.end is None
    assert rig.submit().attempt_id == prefill.attempt_id


# ---- tokens ----


def test_a_repeat_is_cut_off_with_its_logprobs() -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit()
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(4))
    rig.say("p1", prefill, Tokens(0, 0, (5, 6), logprobs[:2]), Tokens(0, 0, (5, 6, 7, 8), logprobs))
    events = [e.event for e in rig.emitted]
    assert events == [Tokens(0, 0, (5, 6), logprobs[:2]), Tokens(0, 2, (7, 8), logprobs[2:])]


def test_what_comes_next_does_not_wait_for_the_prefill_nodes_last_word() -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit(n=2)
    rig.say("p1", prefill, Tokens(0, 0, (5,)), Tokens(1, 0, (7,)))
    rig.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)), Tokens(1, 1, (8,)))
    assert rig.told == [(0, 5), (1, 7), (0, 6), (1, 8)]


def test_an_end_that_overtakes_tokens_waits_for_them() -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit()
    rig.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)), LENGTH, End())
    assert not rig.emitted
    rig.say("p1", prefill, Tokens(0, 0, (5,)))
    assert rig.told == [(0, 5), (0, 6)]
    assert rig.end is None
    assert ("p1", ()) in aborts(rig), "its last word is still under way"


def test_an_end_with_tokens_missing_is_the_attempts_failure() -> None:
    rig, prefill = handed_over()
    rig.say("d1", prefill, Tokens(0, 1, (6,)), End())
    assert rig.prefills[-1][1].samples[0].output_tokens == (5, 6)


def test_an_error_after_all_samples_ended_is_none() -> None:
    rig, prefill = handed_over()
    rig.say("d1", prefill, Tokens(0, 1, (6,)), LENGTH, End(InternalError("too late")))
    assert rig.end is None
    assert len(rig.core.requests) == 0


# ---- stop strings ----


def test_a_stopped_sample_is_aborted_alone_and_the_attempt_with_its_last_one() -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit(n=2)
    rig.say("p1", prefill, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)))
    rig.core.stop_sample("r", 0, 2.0)
    rig.collect()
    assert aborts(rig) == [("p1", (0,)), ("d1", (0,))]
    rig.core.stop_sample("r", 0, 2.0)
    rig.core.stop_sample("r", 1, 2.0)
    rig.collect()
    assert aborts(rig)[2:] == [("p1", ()), ("d1", ())]
    assert rig.end is None


# ---- nodes that are lost ----


@pytest.mark.parametrize(
    ("said", "by"), [(HANDED_OFF, "p1"), (ADOPTED, "d1")], ids=["adopted is missing", "its last word is missing"]
)
def test_until_both_have_spoken_a_lost_prefill_node_costs_the_attempt(said: object, by: str) -> None:
    rig = RouterRig("p1", "d1", "p2")
    prefill = rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)))
    rig.say(by, prefill, said)
    rig.core.node_lost("p1", "died", 2.0)
    rig.collect()
    where, again = rig.prefills[-1]
    assert (where, again.attempt_id.attempt, again.samples[0].output_tokens) == ("p2", 1, (5,))
    assert ("d1", ()) in aborts(rig)


def test_a_decode_node_that_begins_with_what_is_over_is_told_so() -> None:
    """When it was over, the node's session was down."""
    rig = RouterRig("p1", "d1", "d2")
    prefill = rig.submit()
    assert prefill.decode
    where = prefill.decode.incarnation
    rig.core.node_lost(where, "its stream broke", 2.0)
    rig.collect()
    assert aborts(rig) == [("p1", ())]
    rig.core.node_up(info(where, NodeRole.DECODE), 2.1)
    rig.say(where, prefill, ADOPTED, Tokens(0, 1, (6,)))
    assert aborts(rig) == [("p1", ()), (where, ())]
    assert not rig.emitted


def test_a_prefill_node_that_stops_after_its_last_word_costs_nothing() -> None:
    """It has died if it says nothing, and has stopped after its work if it said that it would."""
    rig = RouterRig("p1", "d1", "p2")
    prefill = rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)), HANDED_OFF)
    rig.core.node_load("p1", Load(draining=True), 2.0)
    rig.core.node_lost("p1", "the node was stopped", 2.0)
    rig.collect()
    assert aborts(rig) == []
    rig.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)), LENGTH, End())
    assert len(rig.prefills) == 1
    assert rig.told == [(0, 5), (0, 6)]
    assert rig.end is None


def test_a_prefill_node_that_is_stopped_before_its_last_word_costs_the_attempt() -> None:
    rig = RouterRig("p1", "d1", "p2")
    prefill = rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)))
    rig.say("d1", prefill, ADOPTED)
    rig.core.node_load("p1", Load(draining=True), 2.0)
    rig.core.node_lost("p1", "the node was stopped", 2.0)
    rig.collect()
    assert rig.prefills[-1][1].attempt_id.attempt == 1


def test_a_prefill_node_that_is_lost_later_costs_nothing() -> None:
    rig, prefill = handed_over("p2")
    rig.core.node_lost("p1", "died", 2.0)
    rig.say("d1", prefill, Tokens(0, 1, (6,)), LENGTH, End())
    assert len(rig.prefills) == 1
    assert rig.told == [(0, 5), (0, 6)]
    assert rig.end is None


def test_a_lost_decode_node_costs_the_attempt_at_any_time() -> None:
    rig, _ = handed_over("d2")
    rig.core.node_lost("d1", "died", 2.0)
    rig.collect()
    again = rig.prefills[-1][1]
    assert again.attempt_id.attempt == 1
    assert again.decode
    assert again.decode.incarnation == "d2"
    assert rig.core.states() == [AttemptState.QUEUED]


# ---- the next attempt ----


@pytest.mark.parametrize("error", [CacheExhausted, NodeUnavailable, TransferError, PeerLost])
def test_what_a_node_could_not_do_another_may(error: type[BatonError]) -> None:
    rig = RouterRig("p1", "d1", "d2")
    rig.say("p1", rig.submit(), End(error("not here")))
    assert rig.prefills[-1][1].attempt_id.attempt == 1


def test_four_attempts_are_enough() -> None:
    rig = RouterRig("p1", "d1")
    rig.submit()
    for _ in range(4):
        rig.say("d1", rig.prefills[-1][1], End(TransferError("damaged")))
    assert isinstance(rig.end, TransferError)
    assert [prefill.attempt_id.attempt for _, prefill in rig.prefills] == [0, 1, 2, 3]


def test_nodes_that_failed_earlier_attempts_are_all_avoided() -> None:
    rig = RouterRig("p1", "d1", "d2", "d3")
    rig.submit()
    asked = []
    for _ in range(3):
        target = rig.prefills[-1][1].decode
        assert target
        asked.append(target.incarnation)
        rig.say(target.incarnation, rig.prefills[-1][1], End(TransferError("damaged")))
    assert sorted(asked) == ["d1", "d2", "d3"]


def test_a_retry_has_what_is_left_of_the_deadline() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    assert first.deadline_s == 60.0
    rig.say("p1", first, End(TransferError("lost")), now=45.0)
    assert rig.prefills[-1][1].deadline_s == 15.0


def test_a_sample_with_output_and_one_without_go_on_by_themselves() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit(n=2)
    rig.say("p1", first, Tokens(0, 0, (5,)), End(TransferError("lost")))
    again = [prefill for _, prefill in rig.prefills[1:]]
    assert [(p.attempt_id.request_id, len(p.samples)) for p in again] == [("r/0", 1), ("r/1", 1)]


def test_nodes_whose_blocks_differ_are_no_pair() -> None:
    rig = RouterRig("p1")
    other = info("d1", NodeRole.DECODE)
    rig.core.node_up(dataclasses.replace(other, layout=dataclasses.replace(other.layout, block_size=32)), 0.0)
    reason = rig.core.pool.why_not_ready()
    assert reason
    assert "block_size 16 != 32" in reason
    rig.core.node_up(info("d2", NodeRole.DECODE), 0.0)
    target = rig.submit().decode
    assert target
    assert target.incarnation == "d2"


# ---- ends ----


def test_a_deadline_ends_the_request_at_that_very_time() -> None:
    rig = RouterRig("p1", "d1")
    rig.submit()
    assert rig.core.next_deadline() == 60.0
    rig.core.tick(59.9)
    rig.collect()
    assert not rig.emitted
    rig.core.tick(60.0)
    rig.collect()
    assert isinstance(rig.end, DeadlineExceeded)
    assert aborts(rig) == [("p1", ()), ("d1", ())]


def test_the_next_deadline_is_the_earliest() -> None:
    rig = RouterRig("p1", "d1")
    for name, deadline_s in (("a", 60.0), ("b", 20.0), ("c", 90.0)):
        rig.core.submit(RoutedRequest(name, (1, 2), 1, SamplingParams(), deadline_s), 0.0)
    assert rig.core.next_deadline() == 20.0
    rig.core.tick(20.0)
    assert rig.core.next_deadline() == 60.0


def test_a_client_that_leaves_frees_both_nodes() -> None:
    rig = RouterRig("p1", "d1")
    rig.submit()
    rig.core.cancel("r", 1.0)
    rig.core.cancel("r", 1.0)
    rig.collect()
    assert isinstance(rig.end, RequestCancelled)
    assert aborts(rig) == [("p1", ()), ("d1", ())]


def test_after_its_last_word_a_prefill_node_is_told_nothing_more() -> None:
    rig, _ = handed_over()
    rig.core.cancel("r", 1.0)
    rig.collect()
    assert [a.incarnation for a in rig.sent if isinstance(a, ToNode) and isinstance(a.message, Abort)] == ["d1"]


def test_a_node_that_computes_all_alone_cannot_have_handed_it_over() -> None:
    """Else its loss would go unnoticed, and the request would wait for its deadline."""
    rig = RouterRig("d1", "d2", with_prefill=False)
    prefill = rig.submit()
    ((first, _),) = rig.prefills
    rig.say(first, prefill, Tokens(0, 0, (5,)), HANDED_OFF)
    rig.core.node_lost(first, "died", 2.0)
    rig.collect()
    assert [name for name, _ in rig.prefills] == [first, {"d1": "d2", "d2": "d1"}[first]]
