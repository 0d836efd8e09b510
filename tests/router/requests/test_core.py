"""What the router decides when an attempt is lost: which cases deserve another one, and where."""

from __future__ import annotations

import pytest

from baton.errors import InternalError, Overloaded, PeerLost
from baton.messages import Adopted, End, HandedOff, KvEvents, Load, Started, Tokens
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.requests.recovery import RETURN_S
from router.requests.request_state import RoutedRequest
from tests.router.rig import RouterRig, info


def test_decode_nodes_that_are_meant_to_be_alone_are_enough() -> None:
    rig = RouterRig(with_prefill=False)
    assert rig.core.pool.why_not_ready() == "no decode node"
    rig.core.node_up(info("d1", NodeRole.DECODE), 0.0)
    assert rig.core.pool.why_not_ready() is None
    assert rig.submit().decode is None
    assert rig.core.pool.why_degraded(0.0) is None
    alone = RouterRig("d1")
    assert alone.core.pool.why_not_ready() is None
    assert alone.core.pool.why_degraded(0.0) == "no prefill node"
    assert RouterRig().core.pool.why_not_ready() == "no prefill node and no decode node"


def test_a_full_node_is_passed_over_for_another() -> None:
    rig = RouterRig("p1", "d1", "d2")
    first = rig.submit()
    rig.say("p1", first, End(Overloaded("full")))
    (_, again) = rig.prefills[-1]
    assert again.attempt_id.attempt == 1
    assert again.decode
    assert first.decode
    assert again.decode.incarnation != first.decode.incarnation


def test_a_token_that_comes_before_the_logprobs_of_the_prompt_costs_the_attempt() -> None:
    rig = RouterRig("p1", "d1")
    params = SamplingParams(max_tokens=8, num_prompt_logprobs=0)
    rig.core.submit(RoutedRequest("r", (1, 2, 3), 1, params, 60.0), 0.0)
    rig.collect()
    rig.say("p1", rig.prefills[-1][1], Started(0, 0.0), Tokens(0, 0, (5,)))
    assert rig.told == []
    assert [prefill.attempt_id.attempt for _, prefill in rig.prefills] == [0, 1]


@pytest.mark.parametrize(("said", "num_attempts"), [((), 2), ((Started(0, 0.0),), 1)])
def test_a_full_prefill_node_is_passed_over_and_a_full_decode_node_not_asked_again(
    said: tuple[Started, ...], num_attempts: int
) -> None:
    """Another prefill node would ask the same decode node."""
    rig = RouterRig("p1", "p2", "d1")
    rig.say("p1", rig.submit(), *said, End(Overloaded("full")))
    assert [name for name, _ in rig.prefills] == ["p1", "p2"][:num_attempts]
    if num_attempts == 2:
        rig.say("p2", rig.prefills[-1][1], End(Overloaded("full")))
    assert isinstance(rig.end, Overloaded)


def test_when_all_are_full_the_client_is_told_so() -> None:
    rig = RouterRig("p1", "d1")
    rig.say("p1", rig.submit(), End(Overloaded("full")))
    assert isinstance(rig.end, Overloaded)
    assert len(rig.core.requests) == 0


def test_overloaded_and_then_nobody_left_is_an_end_too() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.core.pool.remove("p1")
    rig.core.pool.remove("d1")
    rig.say("p1", first, End(Overloaded("full")))
    assert isinstance(rig.end, Overloaded)


def test_our_own_bug_is_not_tried_again() -> None:
    rig = RouterRig("p1", "d1", "d2")
    rig.say("p1", rig.submit(), End(InternalError("bug")))
    assert isinstance(rig.end, InternalError)
    assert len(rig.prefills) == 1


@pytest.mark.parametrize(("speaker", "avoided"), [("p1", "d1"), ("d1", "p1")])
def test_who_lost_its_peer_blames_the_peer(speaker: str, avoided: str) -> None:
    rig = RouterRig("p1", "d1", "p2", "d2")
    rig.say(speaker, rig.submit(), End(PeerLost("gone")))
    where, again = rig.prefills[-1]
    assert again.decode
    assert avoided not in (where, again.decode.incarnation)
    assert {"p1", "d1"} <= rig.aborted


def lose_two(rig: RouterRig, *between: str) -> None:
    """The decode nodes d1 and d2, one after the other, with a request on them. `between`: who comes back before the
    second is lost."""
    rig.submit()
    for name in ("d1", "d2"):
        decode = rig.prefills[-1][1].decode
        assert decode
        assert decode.incarnation == name
        rig.core.node_lost(name, "reset", 1.0)
        for back in between:
            rig.core.node_up(info(back, NodeRole.DECODE), 1.0)
        rig.collect()


def test_a_request_is_given_up_when_two_nodes_died_of_it() -> None:
    rig = RouterRig("p1", "d1", "d2", "d3")
    lose_two(rig)
    rig.core.node_up(info("d4", NodeRole.DECODE), 1.1)
    rig.collect()
    assert len(rig.prefills) == 2, "it waits for d1 or d2: d3 might die of it, too"
    assert rig.core.next_deadline() == 1.0 + RETURN_S
    rig.tick(1.0 + RETURN_S)
    assert isinstance(rig.end, InternalError)
    assert "decode node d1: reset; decode node d2: reset" in rig.end.message
    assert rig.core.next_deadline() is None


@pytest.mark.parametrize("when", ["before the other is lost", "later"])
def test_a_request_goes_on_when_one_of_two_nodes_comes_back(when: str) -> None:
    """The same incarnation has not died: its link was cut, as by a firewall that resets all at once, or it was
    silent."""
    rig = RouterRig("p1", "d1", "d2", "d3")
    if when == "later":
        lose_two(rig)
        assert len(rig.prefills) == 2
        rig.core.node_up(info("d1", NodeRole.DECODE), 1.2)
        rig.collect()
    else:
        lose_two(rig, "d1")
    where, again = rig.prefills[-1]
    assert (len(rig.prefills), again.attempt_id.attempt) == (3, 2)
    assert rig.core.next_deadline() == 60.0
    rig.say(where, again, Tokens(0, 0, (5,)), HandedOff(0.1))
    assert rig.told == [(0, 5)]


def test_what_waits_for_a_node_to_come_back_can_end_before() -> None:
    """Of two answers one waits; its stop string is noticed late, and the other one goes on."""
    rig = RouterRig("p1", "d1", "d2", "d3")
    first = rig.submit(n=2)
    rig.say("p1", first, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)), HandedOff(0.1))
    rig.say("d1", first, Adopted(0.1, 0, 9))
    rig.core.node_lost("d1", "reset", 1.0)
    rig.collect()
    (one, other) = [prefill for _, prefill in rig.prefills[1:]]
    assert one.decode
    assert other.decode
    lost = one if one.decode.incarnation == "d2" else other
    assert {one.decode.incarnation, other.decode.incarnation} == {"d2", "d3"}
    rig.core.node_lost("d2", "reset", 1.0)
    rig.core.stop_sample("r", lost.samples[0].index, 1.5)
    rig.tick(1.0 + RETURN_S)
    assert len(rig.core.requests) == 1
    assert rig.core.next_deadline() == 60.0


@pytest.mark.parametrize("silent_s", [1.0, 1.5])
def test_a_node_that_was_silent_before_it_was_given_a_request_did_not_die_of_it(silent_s: float) -> None:
    """A network that fails takes all nodes at once, and the router misses one after the other."""
    rig = RouterRig("p1", "d1", "d2", "d3")
    rig.submit()
    for name in ("d1", "d2"):
        rig.core.node_load(name, Load(), 10.0)
    rig.core.node_lost("d1", "silent", 10.0 + silent_s)
    rig.collect()
    again = rig.prefills[-1][1]
    assert again.decode
    assert again.decode.incarnation == "d2"
    rig.core.node_lost("d2", "silent", 13.0)
    rig.collect()
    rig.tick(13.0 + RETURN_S)
    if silent_s > 1.0:
        assert len(rig.prefills) == 3
    else:
        assert isinstance(rig.end, InternalError)


@pytest.mark.parametrize("speaker", ["router", "p1"])
def test_nodes_that_end_together_are_lost_once(speaker: str) -> None:
    """A request that was on one of them goes to a third node at once, and is not held to be the cause."""
    rig = RouterRig("p1", "d+0", "d+1", "d3")
    first = rig.submit()
    assert first.decode
    lost = first.decode.incarnation
    assert lost.startswith("d+")
    if speaker == "p1":
        rig.say("p1", first, End(PeerLost("gone")))
    rig.core.node_lost(lost, "died", 1.0)
    rig.collect()
    for name in {"d+0", "d+1"} - {lost}:
        rig.core.node_lost(name, "died", 1.0)
    rig.collect()
    assert len(rig.core.requests) == 1
    again = rig.prefills[-1][1]
    assert again.decode
    assert again.decode.incarnation == "d3"
    if speaker == "router":
        assert len(rig.prefills) == 2
    rig.core.node_lost("d3", "died", 2.0)
    rig.tick(2.0 + RETURN_S)
    assert isinstance(rig.end, InternalError)


def test_samples_that_have_output_go_on_one_by_one() -> None:
    rig = RouterRig("p1", "d1", "d2")
    first = rig.submit(n=2)
    rig.say("p1", first, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)), HandedOff(0.1))
    rig.say("d1", first, Adopted(0.1, 0, 9), Tokens(0, 1, (7,)))
    rig.core.node_lost("d1", "died", 2.0)
    rig.collect()
    again = [p for _, p in rig.prefills[1:]]
    assert [p.attempt_id.request_id for p in again] == ["r/0", "r/1"]
    assert [p.samples[0].output_tokens for p in again] == [(5, 7), (6,)]
    assert all(p.attempt_id.attempt == 1 for p in again)


def test_what_decode_says_before_prefill_has_spoken_waits_its_turn() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.say("d1", first, Adopted(0.1, 0, 9), Tokens(0, 1, (6, 7)))
    assert rig.emitted == []
    rig.say("p1", first, Tokens(0, 0, (5,)))
    assert rig.told == [(0, 5), (0, 6), (0, 7)]


@pytest.mark.parametrize("overtakes", [False, True])
def test_a_computed_prompt_counts_whichever_node_is_heard_first(overtakes: bool) -> None:
    rig = RouterRig("p1", "d1")
    prefill = rig.submit()
    words = [("p1", Started(1, 0.0)), ("d1", Adopted(0.1, 0, 9))]
    for name, word in reversed(words) if overtakes else words:
        rig.say(name, prefill, word)
    rig.say("p1", prefill, Tokens(0, 0, (5,)))
    rig.say("d1", prefill, Tokens(0, 1, (6,)))
    assert rig.core.pool.num_tokens() == {"p1": 3, "d1": 1}


def test_a_gap_fails_the_attempt() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.say("p1", first, Tokens(0, 0, (5,)), HandedOff(0.1))
    rig.say("d1", first, Adopted(0.1, 0, 9), Tokens(0, 2, (7,)))
    assert rig.prefills[-1][1].attempt_id.attempt == 1
    assert rig.prefills[-1][1].samples[0].output_tokens == (5,)


def test_the_prefix_index_forgets_a_node_that_is_lost() -> None:
    rig = RouterRig("p1", "d1")
    block = b"a" * 32
    rig.core.node_blocks("d1", KvEvents(0, (block,), snapshot=True))
    assert rig.core.prefix_index.held([block]) == {"d1": 1}
    rig.core.node_lost("d1", "broke", 1.0)
    assert rig.core.prefix_index.held([block]) == {}
    rig.core.node_blocks("d1", KvEvents(1, (block,)))  # of the session before
    assert rig.core.prefix_index.held([block]) == {}
