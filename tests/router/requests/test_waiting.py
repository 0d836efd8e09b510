"""Requests without a node, requests that may be what their nodes die of, and pairs of nodes that do not work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, InternalError, NodeUnavailable, PeerLost, TransferError
from baton.messages import Adopted, End, HandedOff, Load, Prefill, Tokens
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.placement.circuit_breakers import MAX_FAILURES
from router.placement.placement import Placement
from router.placement.pool import Pool
from router.requests.recovery import MAX_ATTEMPTS, RETURN_S
from router.requests.request_state import AttemptState, RequestEnd, RoutedRequest
from tests.router.requests.room import placed
from tests.router.rig import RouterRig, info


def come(rig: RouterRig, name: str, now: float = 2.0) -> None:
    rig.core.node_up(info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE), now)
    rig.collect()


def lose(rig: RouterRig, name: str, now: float = 2.0) -> None:
    rig.core.node_lost(name, "died", now)
    rig.collect()


def submit(rig: RouterRig, name: str, deadline_s: float = 60.0) -> None:
    rig.core.submit(RoutedRequest(name, (1, 2, 3), 1, SamplingParams(max_tokens=8), deadline_s), 0.0)
    rig.collect()


# ---- without a node ----


def test_who_came_first_is_placed_first_when_a_node_comes() -> None:
    rig = RouterRig("p1")
    for name in "abc":
        submit(rig, name)
    assert placed(rig) == []
    assert rig.core.states() == [AttemptState.UNPLACED] * 3
    rig.core.cancel("b", 1.0)
    come(rig, "d1")
    assert placed(rig) == ["a", "c"]
    assert rig.core.states() == [AttemptState.QUEUED] * 2


def test_who_waits_in_vain_is_told_so_at_its_deadline() -> None:
    rig = RouterRig("p1")
    submit(rig, "a", deadline_s=5.0)
    assert rig.core.next_deadline() == 5.0
    rig.core.tick(5.0)
    rig.collect()
    assert isinstance(rig.end, NodeUnavailable)
    assert "no decode node" in rig.end.message
    come(rig, "d1", 6.0)
    assert placed(rig) == []
    assert rig.core.next_deadline() is None


def test_deadlines_of_those_that_run_are_their_own() -> None:
    rig = RouterRig("p1", "d1")
    submit(rig, "a", deadline_s=5.0)
    rig.core.tick(5.0)
    rig.collect()
    assert isinstance(rig.end, DeadlineExceeded)
    assert rig.aborted == {"p1", "d1"}


def test_the_queue_is_bounded() -> None:
    rig = RouterRig("p1", max_waiting=1)
    submit(rig, "a")
    with pytest.raises(NodeUnavailable, match="no decode node, and 1 requests wait for one already"):
        submit(rig, "b")
    assert len(rig.core.requests) == 1


def test_an_attempt_that_was_lost_waits_for_a_node_with_what_it_has() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit(n=2)
    rig.say("p1", first, Tokens(0, 0, (5,)), Tokens(1, 0, (6,)), HandedOff(0.1))
    lose(rig, "d1")
    assert rig.core.states() == [AttemptState.UNPLACED] * 2, "each sample goes on by itself"
    rig.core.stop_sample("r", 1, 3.0)
    come(rig, "d2")
    (again,) = [p for _, p in rig.prefills[1:]]
    assert (again.attempt_id.attempt, again.samples[0].output_tokens) == (1, (5,))


def test_a_request_whose_samples_all_stop_while_it_waits_has_ended() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.say("p1", first, Tokens(0, 0, (5,)))
    lose(rig, "d1")
    rig.core.stop_sample("r", 0, 3.0)
    rig.collect()
    assert rig.end is None
    assert rig.core.states() == []


def test_nodes_that_do_not_fit_are_nothing_to_wait_for() -> None:
    rig = RouterRig("p1")
    wrong = info("d1", NodeRole.DECODE)
    rig.core.node_up(dataclasses.replace(wrong, layout=dataclasses.replace(wrong.layout, block_size=32)), 0.0)
    with pytest.raises(NodeUnavailable, match="block_size 16 != 32"):
        submit(rig, "a")


def test_nodes_that_do_not_fit_are_compared_once_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand may wait, and each load of each node asks again."""
    rig = RouterRig("p1")
    for name in "abc":
        submit(rig, name)
    asked, choose = list[float](), Pool.choose

    def noted(pool: Pool, avoid: set[str], now: float, *more: Any) -> Placement | None:
        asked.append(now)
        return choose(pool, avoid, now, *more)

    monkeypatch.setattr(Pool, "choose", noted)
    wrong = info("d1", NodeRole.DECODE)
    rig.core.node_up(dataclasses.replace(wrong, layout=dataclasses.replace(wrong.layout, block_size=32)), 2.0)
    rig.core.node_load("p1", Load(), 3.0)
    assert asked == [2.0, 3.0]
    rig.core.tick(60.0)
    rig.collect()
    errors = [e.event.error for e in rig.emitted if isinstance(e.event, RequestEnd)]
    assert [type(error) for error in errors] == [NodeUnavailable] * 3
    assert all("block_size 16 != 32" in str(error) for error in errors)


def test_a_node_that_is_wanted_again_gets_what_waits() -> None:
    rig = RouterRig("p1", "d1")
    rig.core.drain_node("d1", True, 0.0)
    submit(rig, "a")
    assert placed(rig) == []
    rig.core.drain_node("d1", False, 1.0)
    rig.collect()
    assert placed(rig) == ["a"]


def test_a_node_that_stops_gets_nothing_new() -> None:
    rig = RouterRig("p1", "d1", "d2")
    rig.core.node_load("d1", Load(draining=True), 0.0)
    submit(rig, "a")
    assert rig.prefills[-1][1].decode is not None
    assert rig.prefills[-1][1].decode.incarnation == "d2"
    rig.core.node_load("d2", Load(draining=True), 0.0)
    assert rig.core.pool.why_not_ready() == "no decode node"


def test_when_the_router_stops_nobody_is_told_that_he_went_away() -> None:
    rig = RouterRig("p1", "d1")
    rig.submit()
    rig.core.stop(1.0)
    rig.collect()
    assert isinstance(rig.end, NodeUnavailable)
    assert "the server was stopped" in rig.end.message


# ---- what nodes die of ----


def last(rig: RouterRig) -> tuple[str, Prefill]:
    return rig.prefills[-1]


def test_a_request_takes_two_nodes_with_it_and_no_third() -> None:
    rig = RouterRig("p1", "p2", "p3", "d1", "d2", "d3")
    rig.submit()
    lose(rig, last(rig)[0], now=1.0)
    assert len(rig.prefills) == 2
    lose(rig, last(rig)[0], now=1.0)
    rig.tick(1.0 + RETURN_S)
    assert len(rig.prefills) == 2
    assert isinstance(rig.end, InternalError)
    assert "prefill node p1: died; prefill node p2: died" in rig.end.message


def test_nor_when_their_peers_are_heard_of_first() -> None:
    rig = RouterRig("p1", "p2", "p3", "d1", "d2", "d3")
    rig.submit()
    for _ in range(2):
        where, prefill = last(rig)
        assert prefill.decode is not None
        rig.say(prefill.decode.incarnation, prefill, End(PeerLost("gone")))
        lose(rig, where)
    rig.tick(2.0 + RETURN_S)
    assert len(rig.prefills) == 2
    assert isinstance(rig.end, InternalError)


def test_links_that_break_between_nodes_that_live_do_not_count_as_lost_nodes() -> None:
    rig = RouterRig("p1", "p2", "p3", "p4", "d1", "d2", "d3", "d4")
    rig.submit()
    for _ in range(MAX_ATTEMPTS):
        where, prefill = last(rig)
        rig.say(where, prefill, End(PeerLost("gone")))
    assert len(rig.prefills) == MAX_ATTEMPTS
    assert isinstance(rig.end, PeerLost)


def test_nodes_that_were_told_to_stop_do_not_count() -> None:
    rig = RouterRig("p1", "p2", "p3", "d1")
    rig.submit()
    for _ in range(2):
        where = last(rig)[0]
        rig.core.node_load(where, Load(draining=True), 2.0)
        lose(rig, where)
    assert len(rig.prefills) == 3


# ---- pairs ----


def fail(rig: RouterRig, name: str, error: TransferError, now: float) -> None:
    submit(rig, name)
    where, prefill = last(rig)
    rig.say(where, prefill, End(error), now=now)
    rig.core.cancel(name, now)
    rig.collect()


def test_a_pair_that_fails_again_and_again_is_left_alone_and_named() -> None:
    rig = RouterRig("p1", "d1")
    for name in range(MAX_FAILURES):
        assert rig.core.pool.why_degraded(1.0) is None
        fail(rig, str(name), TransferError("no route"), 1.0)
    submit(rig, "c")
    assert last(rig)[1].decode is None, "the decode node does it alone"
    assert rig.core.pool.why_degraded(1.0) == "p1 and d1 do not work together: no route"
    assert rig.core.pool.why_not_ready() is None


def test_a_handoff_whose_kv_arrives_damaged_is_none_that_worked() -> None:
    rig = RouterRig("p1", "d1")
    rig.submit()
    for _ in range(MAX_FAILURES):
        where, prefill = last(rig)
        assert prefill.decode is not None
        num_tokens = len(prefill.samples[0].output_tokens)
        rig.say(where, prefill, Tokens(0, num_tokens, (5,)), HandedOff(0.1))
        rig.say("d1", prefill, End(TransferError("damaged")))
    where, prefill = last(rig)
    assert (where, prefill.decode) == ("d1", None), "the decode node does it alone"


def test_one_handoff_that_succeeds_makes_up_for_those_that_failed() -> None:
    rig = RouterRig("p1", "d1")
    for name in "abcd":
        submit(rig, name)
        where, prefill = last(rig)
        rig.say(where, prefill, End(TransferError("no route")), now=1.0)
        where, prefill = last(rig)
        assert prefill.decode is not None
        rig.say("d1", prefill, Adopted(0.1, 0, 9))
        rig.say(where, prefill, Tokens(0, 0, (5,)), HandedOff(0.1))
