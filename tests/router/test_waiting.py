"""Requests without a node, requests that may be what their nodes die of, and pairs of nodes that do not work."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import DeadlineExceeded, InternalError, NodeUnavailable, PeerLost, TransferError
from baton.messages import Adopted, End, HandedOff, Load, NodeRole, Prefill, Tokens
from baton.sampling import SamplingParams
from router.circuit_breakers import MAX_FAILURES
from router.core import MAX_ATTEMPTS
from router.life import AttemptState, RoutedRequest
from tests.router.house import House, info


def come(house: House, name: str, now: float = 2.0) -> None:
    house.core.node_up(info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE), now)
    house.collect()


def lose(house: House, name: str, now: float = 2.0) -> None:
    house.core.node_lost(name, "died", now)
    house.collect()


def submit(house: House, name: str, deadline_s: float = 60.0) -> None:
    house.core.submit(RoutedRequest(name, (1, 2, 3), 1, SamplingParams(max_tokens=8), deadline_s), 0.0)
    house.collect()


def placed(house: House) -> list[str]:
    return [prefill.attempt_id.request_id for _, prefill in house.prefills]


# ---- without a node ----


def test_who_came_first_is_placed_first_when_a_node_comes() -> None:
    house = House("p1")
    for name in "abc":
        submit(house, name)
    assert placed(house) == []
    assert house.core.states() == [AttemptState.UNPLACED] * 3
    house.core.cancel("b", 1.0)
    come(house, "d1")
    assert placed(house) == ["a", "c"]
    assert house.core.states() == [AttemptState.QUEUED] * 2


def test_who_waits_in_vain_is_told_so_at_its_deadline() -> None:
    house = House("p1")
    submit(house, "a", deadline_s=5.0)
    assert house.core.next_deadline() == 5.0
    house.core.tick(5.0)
    house.collect()
    assert isinstance(house.end, NodeUnavailable)
    assert "no decode node" in house.end.message
    come(house, "d1", 6.0)
    assert placed(house) == []
    assert house.core.next_deadline() is None


def test_deadlines_of_those_that_run_are_their_own() -> None:
    house = House("p1", "d1")
    submit(house, "a", deadline_s=5.0)
    house.core.tick(5.0)
    house.collect()
    assert isinstance(house.end, DeadlineExceeded)
    assert house.aborted == {"p1", "d1"}


def test_the_queue_is_bounded() -> None:
    house = House("p1", max_waiting=1)
    submit(house, "a")
    with pytest.raises(NodeUnavailable, match="no decode node, and 1 requests wait for one already"):
        submit(house, "b")
    assert house.core.num_requests == 1


def test_an_attempt_that_was_lost_waits_for_a_node_with_what_it_has() -> None:
    house = House("p1", "d1")
    first = house.submit(n=2)
    house.say("p1", first, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)), HandedOff(0.1))
    lose(house, "d1")
    assert house.core.states() == [AttemptState.UNPLACED] * 2, "each sample goes on by itself"
    house.core.stop_sample("r", 1, 3.0)
    come(house, "d2")
    (again,) = [p for _, p in house.prefills[1:]]
    assert (again.attempt_id.attempt, again.samples[0].output_tokens) == (1, (5,))


def test_a_request_whose_samples_all_stop_while_it_waits_has_ended() -> None:
    house = House("p1", "d1")
    first = house.submit()
    house.say("p1", first, Tokens(0, 0, (5,)))
    lose(house, "d1")
    house.core.stop_sample("r", 0, 3.0)
    house.collect()
    assert house.end is None
    assert house.core.states() == []


def test_nodes_that_do_not_fit_are_nothing_to_wait_for() -> None:
    house = House("p1")
    wrong = info("d1", NodeRole.DECODE)
    house.core.node_up(dataclasses.replace(wrong, layout=dataclasses.replace(wrong.layout, block_size=32)), 0.0)
    with pytest.raises(NodeUnavailable, match="block_size 16 != 32"):
        submit(house, "a")


def test_a_node_that_stops_gets_nothing_new() -> None:
    house = House("p1", "d1", "d2")
    house.core.node_load("d1", Load(draining=True), 0.0)
    submit(house, "a")
    assert house.prefills[-1][1].decode is not None
    assert house.prefills[-1][1].decode.incarnation == "d2"
    house.core.node_load("d2", Load(draining=True), 0.0)
    assert house.core.why_not_ready() == "no decode node"


def test_when_the_router_stops_nobody_is_told_that_he_went_away() -> None:
    house = House("p1", "d1")
    house.submit()
    house.core.stop(1.0)
    house.collect()
    assert isinstance(house.end, NodeUnavailable)
    assert "the server was stopped" in house.end.message


# ---- what nodes die of ----


def last(house: House) -> tuple[str, Prefill]:
    return house.prefills[-1]


def test_a_request_takes_two_nodes_with_it_and_no_third() -> None:
    house = House("p1", "p2", "p3", "d1", "d2", "d3")
    house.submit()
    lose(house, last(house)[0])
    assert len(house.prefills) == 2
    lose(house, last(house)[0])
    assert len(house.prefills) == 2
    assert isinstance(house.end, InternalError)
    assert "prefill node p1: died; prefill node p2: died" in house.end.message


def test_nor_when_their_peers_are_heard_of_first() -> None:
    house = House("p1", "p2", "p3", "d1", "d2", "d3")
    house.submit()
    for _ in range(2):
        where, prefill = last(house)
        assert prefill.decode is not None
        house.say(prefill.decode.incarnation, prefill, End(PeerLost("gone")))
        lose(house, where)
    assert len(house.prefills) == 2
    assert isinstance(house.end, InternalError)


def test_links_that_break_between_nodes_that_live_do_not_count_as_lost_nodes() -> None:
    house = House("p1", "p2", "p3", "p4", "d1", "d2", "d3", "d4")
    house.submit()
    for _ in range(MAX_ATTEMPTS):
        where, prefill = last(house)
        house.say(where, prefill, End(PeerLost("gone")))
    assert len(house.prefills) == MAX_ATTEMPTS
    assert isinstance(house.end, PeerLost)


def test_nodes_that_were_told_to_stop_do_not_count() -> None:
    house = House("p1", "p2", "p3", "d1")
    house.submit()
    for _ in range(2):
        where = last(house)[0]
        house.core.node_load(where, Load(draining=True), 0.0)
        lose(house, where)
    assert len(house.prefills) == 3


# ---- pairs ----


def fail(house: House, name: str, error: TransferError, now: float) -> None:
    submit(house, name)
    where, prefill = last(house)
    house.say(where, prefill, End(error), now=now)
    house.core.cancel(name, now)
    house.collect()


def test_a_pair_that_fails_again_and_again_is_left_alone_and_named() -> None:
    house = House("p1", "d1")
    for name in range(MAX_FAILURES):
        assert house.core.why_degraded(1.0) is None
        fail(house, str(name), TransferError("no route"), 1.0)
    submit(house, "c")
    assert last(house)[1].decode is None, "the decode node does it alone"
    assert house.core.why_degraded(1.0) == "p1 and d1 do not work together: no route"
    assert house.core.why_not_ready() is None


def test_one_handoff_that_succeeds_makes_up_for_those_that_failed() -> None:
    house = House("p1", "d1")
    for name in "abcd":
        submit(house, name)
        where, prefill = last(house)
        house.say(where, prefill, End(TransferError("no route")), now=1.0)
        where, prefill = last(house)
        assert prefill.decode is not None
        house.say("d1", prefill, Adopted(0.1, 0, 9))
        house.say(where, prefill, Tokens(0, 0, (5,)), HandedOff(0.1))
