"""Reserves with a lower priority value are granted first, on a decode node that has other work too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import RequestCancelled
from baton.handoff_messages import Refuse, Release
from baton.messages import Abort, AttemptId
from node.events import FromPeer
from tests.protocol.decoding import PEER, Decoding
from tests.protocol.network import EPOCH


def named(name: object) -> AttemptId:
    return AttemptId(EPOCH, str(name), 0)


def release(decoding: Decoding, lease: int) -> None:
    decoding.hear(FromPeer(PEER, Release(decoding.grants[lease - 1].attempt_id)))
    decoding.turn()


@given(st.lists(st.integers(-2, 2), max_size=6))
def test_grants_are_in_order_of_priority_and_then_of_arrival(priorities: list[int]) -> None:
    decoding = Decoding()
    decoding.reserve(named("holds all"), n=decoding.core.engine.config.max_num_seqs)
    for number, priority in enumerate(priorities):
        decoding.reserve(named(number), n=decoding.core.engine.config.max_num_seqs, priority=priority)
    assert len(decoding.grants) == 1
    for lease in range(1, len(priorities) + 2):
        release(decoding, lease)
    expected = sorted(range(len(priorities)), key=lambda number: priorities[number])
    assert [grant.attempt_id for grant in decoding.grants] == [named("holds all"), *map(named, expected)]


def test_one_that_left_the_queue_is_not_granted() -> None:
    decoding = Decoding()
    n = decoding.core.engine.config.max_num_seqs
    decoding.reserve(named("holds all"), n=n)
    for name, priority in (("first", 1), ("gone", 0), ("last", 2)):
        decoding.reserve(named(name), n=n, priority=priority)
    decoding.hear(FromPeer(PEER, Release(named("gone"))))
    release(decoding, 1)
    release(decoding, 2)
    assert [grant.attempt_id.request_id for grant in decoding.grants] == ["holds all", "first", "last"]
    assert not any(isinstance(said, Refuse) and not isinstance(said.error, RequestCancelled) for said in decoding.said)


@pytest.mark.parametrize(("priority", "granted"), [(-1, True), (0, False), (1, False)])
def test_a_reserve_comes_before_prompts_of_a_higher_value_that_wait_here(priority: int, granted: bool) -> None:
    """Of equals, those that came earlier have places in the batch first."""
    decoding = Decoding()
    n = decoding.core.engine.config.max_num_seqs
    engine = decoding.core.engine
    engine.scheduler.reserve_seqs(n)
    decoding.prefill("waits")
    decoding.turn()
    engine.scheduler.unreserve_seqs(1)
    assert engine.num_waiting == 1
    decoding.reserve(named("r"), priority=priority)
    assert bool(decoding.grants) == granted


def test_a_reserve_comes_before_preempted_requests_of_a_higher_value() -> None:
    decoding = Decoding(num_blocks=17)
    decoding.prefill("old", tuple(range(2, 32)), max_tokens=20)
    decoding.turn()
    decoding.prefill("young", tuple(range(40, 70)), max_tokens=20)
    engine = decoding.core.engine
    while not engine.waiting.has_preempted(1e9):
        decoding.turn()
        if decoding.node.model.is_busy:
            decoding.node.advance_device()
    decoding.reserve(named("equal"))
    assert not decoding.grants
    decoding.reserve(named("urgent"), priority=-1)
    assert [grant.attempt_id.request_id for grant in decoding.grants] == ["urgent"]


SHORT, LONG = tuple(range(2, 26)), tuple(range(2, 62))
"""Of 39 blocks, their Reserves take 7 and 16; the long one as a prompt 15."""


def test_later_reserves_leave_a_prompt_the_blocks_that_it_waits_for() -> None:
    decoding = Decoding()
    for number in range(5):
        decoding.reserve(named(number), SHORT)
    assert len(decoding.grants) == 5
    decoding.world.now = 1.0
    decoding.prefill("long", LONG)
    decoding.turn()
    assert decoding.core.engine.num_waiting == 1
    decoding.world.now = 2.0
    for number in range(5, 8):
        decoding.reserve(named(number), SHORT)
    release(decoding, 1)
    assert len(decoding.grants) == 5, "one that came later takes what was freed, and the next one again"
    release(decoding, 2)
    assert decoding.core.engine.num_running == 1
    release(decoding, 3)
    assert [grant.attempt_id for grant in decoding.grants[5:]] == [named(5)]


def test_a_prompt_that_has_gone_keeps_no_blocks_from_reserves() -> None:
    decoding = Decoding()
    for number in range(5):
        decoding.reserve(named(number), SHORT)
    attempt_id = decoding.prefill("long", LONG)
    decoding.turn()
    decoding.reserve(named(5), SHORT)
    decoding.hear(Abort(attempt_id))
    release(decoding, 1)
    assert len(decoding.grants) == 6


@pytest.mark.parametrize("goes", [False, True])
def test_later_prompts_leave_a_reserve_the_blocks_that_it_waits_for(goes: bool) -> None:
    decoding = Decoding()
    for number in range(4):
        decoding.reserve(named(number), SHORT)
    decoding.world.now = 1.0
    decoding.reserve(named("long"), LONG)
    assert len(decoding.grants) == 4
    decoding.world.now = 2.0
    decoding.prefill("short", SHORT)
    decoding.turn()
    engine = decoding.core.engine
    assert engine.num_waiting == 1, "one that came later takes what is free, and the next one again"
    if goes:
        decoding.hear(FromPeer(PEER, Release(named("long"))))
        decoding.turn()
        assert engine.num_running == 1
        return
    release(decoding, 1)
    assert decoding.grants[-1].attempt_id == named("long")
    release(decoding, 2)
    assert engine.num_running == 1


def test_an_adopted_request_keeps_its_priority_and_its_age() -> None:
    decoding = Decoding()
    decoding.reserve(priority=-7, age_s=2.5)
    (grant,) = decoding.grants
    decoding.send(grant)
    decoding.commit(grant, {0: (5,)})
    decoding.turn()
    assert [seq.priority for seq in decoding.core.engine.scheduler.running] == [-7]
    assert [seq.age_s for seq in decoding.core.engine.scheduler.running] == [2.5]
