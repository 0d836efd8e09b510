"""What a decode node takes and grants: one rule at a time."""

from __future__ import annotations

import pytest

from baton.errors import (
    CacheExhausted,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    RequestCancelled,
)
from baton.handoff_messages import Grant, Release
from baton.messages import Abort, AttemptId
from node.events import Draining, FromPeer, SessionLost, ToPrefill
from tests.protocol.decoding import (
    PEER,
    WANT,
    WORK,
    Decoding,
    ends,
    first_tokens,
    hand_over,
    named,
    refusals,
)
from tests.protocol.network import EPOCH
from tests.protocol.node import MAX_MODEL_LEN, MAX_NUM_SEQS


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


# ---- what is taken ----


def test_a_reserve_of_a_router_that_is_not_subscribed_is_refused(decoding: Decoding) -> None:
    decoding.reserve(AttemptId(EPOCH + 1, "r", 0))
    assert refusals(decoding) == [NodeUnavailable]
    assert not decoding.grants
    assert decoding.core.idle


@pytest.mark.parametrize("drains", [False, True])
def test_a_reserve_for_an_earlier_life_or_while_draining_is_refused(decoding: Decoding, drains: bool) -> None:
    if drains:
        decoding.hear(Draining())
        decoding.reserve()
    else:
        decoding.reserve(target_incarnation="earlier")
    assert refusals(decoding) == [NodeUnavailable]


def test_a_repeated_reserve_changes_nothing_and_one_of_work_that_is_over_is_refused(decoding: Decoding) -> None:
    decoding.reserve()
    decoding.reserve()
    assert (len(decoding.grants), refusals(decoding)) == (1, [])
    decoding.hear(Abort(WORK))
    decoding.reserve()
    assert len(decoding.grants) == 1
    assert refusals(decoding) == [RequestCancelled, RequestCancelled]


def test_a_repeated_reserve_that_waits_keeps_waiting(decoding: Decoding) -> None:
    decoding.reserve(named(0), n=MAX_NUM_SEQS)
    decoding.reserve(named(1))
    decoding.reserve(named(1))
    assert refusals(decoding) == []
    decoding.hear(FromPeer(PEER, Release(named(0))))
    decoding.turn()
    assert [grant.attempt_id for grant in decoding.grants] == [named(0), named(1)]


def test_a_higher_attempt_ends_those_below(decoding: Decoding) -> None:
    decoding.reserve()
    decoding.reserve(WORK._replace(attempt=2))
    assert [grant.attempt_id.attempt for grant in decoding.grants] == [1, 2]
    assert refusals(decoding) == [RequestCancelled]
    assert ends(decoding) == [RequestCancelled]


def test_leases_end_with_their_routers_session(decoding: Decoding) -> None:
    decoding.reserve()
    decoding.hear(SessionLost(EPOCH))
    decoding.turn()
    assert not decoding.told, "nobody listens"
    assert refusals(decoding) == [NodeUnavailable]
    assert decoding.node.pool_is_whole()
    decoding.commit(decoding.grants[0], first_tokens(0))
    assert isinstance(decoding.replies[-1].error, NodeUnavailable)
    decoding.reserve(named(1))
    assert refusals(decoding)[1:] == [NodeUnavailable]


def test_leases_end_with_their_prefill_nodes_transport(decoding: Decoding) -> None:
    decoding.reserve(n=MAX_NUM_SEQS)
    decoding.reserve(named(1))  # waits
    decoding.hub.kill(PEER)
    decoding.turn()
    assert ends(decoding) == [PeerLost]
    assert refusals(decoding) == [PeerLost, PeerLost]
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


def test_what_can_never_be_granted_is_refused_at_once(decoding: Decoding) -> None:
    decoding.reserve(n=MAX_NUM_SEQS + 1)
    decoding.reserve(named(1), max_total_tokens=MAX_MODEL_LEN + 1)
    assert refusals(decoding) == [InvalidRequest, InvalidRequest]


def test_what_fits_into_an_idle_pool_is_granted_and_one_block_more_is_refused() -> None:
    decoding, prompt = Decoding(num_blocks=18), tuple(range(2, 62))  # 17 for requests; 15 full ones, 2 to write into
    decoding.reserve(named(0), prompt, n=3)
    assert refusals(decoding) == [CacheExhausted]
    assert decoding.core.load().num_blocks_free == 17
    decoding.reserve(named(1), prompt, n=2)
    assert len(decoding.grants) == 1
    assert decoding.core.load().num_blocks_free == 0


# ---- grants ----


def test_a_grant_needs_a_place_in_the_batch_for_each_sample(decoding: Decoding) -> None:
    decoding.reserve(named(0), n=4)
    decoding.reserve(named(1), n=3)
    assert len(decoding.grants) == 1
    assert decoding.core.load().num_waiting == 1
    decoding.hear(FromPeer(PEER, Release(named(0))))
    decoding.turn()
    assert len(decoding.grants) == 2
    assert decoding.core.engine.scheduler.num_reserved_seqs == 3


def test_a_grant_leaves_as_many_blocks_as_requests_run() -> None:
    decoding = Decoding(num_blocks=18)  # 17 for requests
    decoding.prefill("runs", max_tokens=3)
    decoding.turn()
    assert decoding.core.engine.blocks.num_free == 14
    decoding.reserve(prompt=tuple(range(2, 55)))  # 13 full blocks, and one to write into
    assert not decoding.grants
    decoding.run()
    decoding.turn()
    assert len(decoding.grants) == 1


def test_who_was_preempted_has_blocks_before_any_newcomer() -> None:
    decoding = Decoding(num_blocks=17)
    old = decoding.prefill("old", tuple(range(2, 32)), max_tokens=20)
    decoding.turn()
    young = decoding.prefill("young", tuple(range(40, 70)), max_tokens=20)
    engine = decoding.core.engine
    for _ in range(200):
        if engine.waiting.has_preempted(float("inf")):
            break
        decoding.turn()
        if decoding.node.model.is_busy:
            decoding.node.advance_device()
    assert engine.waiting.has_preempted(float("inf"))
    decoding.reserve()  # would fit
    assert engine.waiting.has_preempted(float("inf"))
    assert not decoding.grants
    decoding.run()
    assert (len(decoding.output(0, old)), len(decoding.output(0, young))) == (20, 20)
    decoding.turn()
    assert len(decoding.grants) == 1


def test_a_serial_is_never_used_again(decoding: Decoding) -> None:
    for number in range(3):
        decoding.reserve(named(number))
        decoding.hear(FromPeer(PEER, Release(named(number))))
    assert [grant.lease for grant in decoding.grants] == [1, 2, 3]


def test_a_prompt_alone_gets_half_of_the_slots_and_another_its_share() -> None:
    decoding = Decoding(num_slots=8)
    prompt = tuple(range(2, 50))  # 6 parts
    decoding.reserve(named(0), prompt)
    decoding.reserve(named(1), prompt)
    decoding.reserve(named(2), prompt)
    assert [grant.num_parts for grant in decoding.grants] == [6, 6, 6]
    assert [grant.credits for grant in decoding.grants] == [4, 2, 2]


def test_blocks_that_are_here_are_shared_and_never_written(decoding: Decoding) -> None:
    decoding.prefill("earlier")
    decoding.run()
    decoding.reserve()
    (grant,) = decoding.grants
    assert (grant.num_held_blocks, grant.num_parts) == (2, 1)
    decoding.send(grant)
    decoding.commit(grant, first_tokens(0))
    decoding.run()
    assert decoding.output(0) == WANT[0][1:]


@pytest.mark.parametrize("direct", [False, True])
def test_queues_are_bounded(decoding: Decoding, direct: bool) -> None:
    decoding.core._max_waiting = decoding.core._reservations._max_waiting = 2
    decoding.reserve(named(9), n=MAX_NUM_SEQS)  # has all places
    for number in range(3):
        if direct:
            decoding.prefill(f"r{number}")
        else:
            decoding.reserve(named(number))
    decoding.turn()
    over = [e for number in range(3) for e in ends(decoding, named(number))] if direct else refusals(decoding)
    assert over == [Overloaded]
    assert decoding.core.load().num_waiting == 2


def test_an_answer_that_has_begun_is_never_refused_for_the_queue(decoding: Decoding) -> None:
    """All streams of a decode node that dies come at once, and none may end for that."""
    decoding.core._reservations._max_waiting = 1
    decoding.reserve(named(9), n=MAX_NUM_SEQS)  # has all places
    for number in range(3):
        decoding.reserve(named(number), goes_on=True)
    assert not refusals(decoding)
    decoding.reserve(named(3))
    assert refusals(decoding) == [Overloaded]
    decoding.hear(FromPeer(PEER, Release(named(9))))
    decoding.turn()
    assert [grant.attempt_id for grant in decoding.grants[1:]] == [named(number) for number in range(3)]


def test_room_that_a_step_makes_is_seen_without_another_event(decoding: Decoding) -> None:
    hand_over(decoding, n=MAX_NUM_SEQS)
    decoding.reserve(named(1))
    assert not decoding.grants[1:]
    for _ in range(10):
        decoding.core.prepare(decoding.now)
        while decoding.node.model.is_busy:
            decoding.node.advance_device()  # the step ends between the halves of a turn
        decoding.core.compute(decoding.now)
        if not decoding.core.engine.num_running:
            break
    granted = [output.message for output in decoding.core.take_outputs() if isinstance(output, ToPrefill)]
    assert isinstance(granted[-1], Grant), "nobody would look"


def test_room_that_a_request_leaves_that_never_runs_is_seen_in_the_same_turn(decoding: Decoding) -> None:
    decoding.reserve(n=2)
    decoding.commit(decoding.grants[0], first_tokens(0, 1))
    decoding.hear(Abort(WORK, (0, 1)))
    decoding.reserve(named(1), n=MAX_NUM_SEQS)
    assert not decoding.grants[1:], "there is no place for its samples"
    decoding.send(decoding.grants[0])
    decoding.turn()
    assert ends(decoding) == [None]
    assert decoding.grants[1:], "nobody would look"
