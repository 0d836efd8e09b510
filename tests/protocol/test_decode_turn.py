"""What long prompts take of a decode node's turns delays neither launches nor tokens."""

from __future__ import annotations

import dataclasses

import pytest

import decode_node.leases
import decode_node.turn_budget
from baton.block_hash import chain
from baton.handoff_messages import Credit, Grant, Reserve
from baton.messages import Abort, Adopted, AttemptId
from decode_node.credits import MIN_OPEN_PARTS
from decode_node.turn_budget import Budget
from engine.pace import SHARE, SLACK_S
from node.events import FromPeer, ToPrefill
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, PART_BLOCKS
from tests.protocol.paced_decoding import NEW, OLD, PROMPT, STEP_S, Decoding


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


def test_a_long_prompt_that_would_delay_the_next_launch_is_adopted_after_it(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, began, due = decoding.reserve(), decoding.now, decoding.core.next_deadline()
    assert due
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", 0.5 * STEP_S / 3)  # it has three blocks
    decoding.wait_until(began + 0.5 * STEP_S)
    decoding.commit(lease)
    assert decoding.core.engine.num_running == 1
    assert not decoding.again, "it would turn round and round"
    decoding.wait_until(due)
    decoding.core.prepare(decoding.now)
    assert decoding.core.engine.num_running == 1, "the launch waits"
    decoding.turn()
    assert decoding.num_in_flight == 2
    assert decoding.core.engine.num_running == 2
    assert decoding.told(Adopted) == []
    decoding.wait_until(began + STEP_S)
    decoding.finish_step()
    decoding.turn()
    decoding.wait_until(decoding.core.next_deadline() or decoding.now)
    decoding.turn()
    assert len(decoding.told(Adopted)) == 1


def test_a_long_prompt_that_comes_early_is_adopted_at_once_but_after_tokens_are_told(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = decoding.reserve()
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", 0.5 * STEP_S / 3)
    decoding.core.handle(FromPeer("p", decoding.commit_of(lease)), decoding.now)
    decoding.core.prepare(decoding.now)
    assert decoding.core.engine.num_running == 1
    assert decoding.core.compute(decoding.now), "when the next launch is due has changed"
    assert decoding.core.engine.num_running == 2


def test_a_long_prompt_is_granted_after_the_launch_and_after_the_second_one_even_if_that_is_late(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)
    message = Reserve(NEW, decoding.node.incarnation, len(PROMPT), tuple(chain(PROMPT, BLOCK_SIZE)), 1, 9.0, 60)
    decoding.core.handle(FromPeer("p", message), decoding.now)
    for _ in range(2):
        assert not decoding.grants
        due = decoding.core.next_deadline()
        assert due
        decoding.turn()
        decoding.wait_until(due)
        decoding.core.prepare(decoding.now)
        decoding.finish_step()  # so that the launch is late, and one step is under way after it
        decoding.core.compute(decoding.now)
        assert decoding.num_in_flight == 1
        decoding.turn()
    assert len(decoding.grants) == 1


def test_of_several_long_prompts_only_those_are_granted_for_which_there_is_time(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", 0.3 * STEP_S)  # they have two blocks each
    due = decoding.core.next_deadline()
    assert due
    for name in ("a", "b"):
        message = Reserve(AttemptId(EPOCH, name, 0), decoding.node.incarnation, len(PROMPT), (), 1, 60.0, 60)
        decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    assert len(decoding.grants) == 1
    decoding.wait_until(due)
    decoding.turn()
    assert len(decoding.grants) == 2


def test_of_several_long_prompts_only_those_are_adopted_for_which_there_is_time(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, due = tuple(chain(PROMPT, BLOCK_SIZE)), decoding.core.next_deadline()
    assert due
    for name in ("a", "b"):
        attempt_id = AttemptId(EPOCH, name, 0)
        message = Reserve(attempt_id, decoding.node.incarnation, len(PROMPT), hashes, 1, 60.0, 60)
        decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    for grant in decoding.grants:
        commit = dataclasses.replace(decoding.commit_of(grant.lease), attempt_id=grant.attempt_id)
        decoding.core.handle(FromPeer("p", commit), decoding.now)
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", 0.5 * STEP_S / 3)
    decoding.turn()
    assert decoding.core.engine.num_running == 2
    decoding.wait_until(due)
    decoding.turn()
    assert decoding.core.engine.num_running == 3


def test_a_budget_may_be_used_up_and_one_that_does_not_fit_takes_nothing_of_it() -> None:
    budget = Budget(num_blocks=5)
    assert [budget.spend(num_blocks) for num_blocks in (6, 3, 3, 2, 1)] == [False, True, False, True, False]


@pytest.mark.parametrize("one_long", [False, True])
def test_after_a_long_prompt_others_wait_only_if_there_is_time_for_one(
    one_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 2)
    budget = Budget(one_long=one_long)
    assert [budget.spend(num_blocks) for num_blocks in (2, 2, 3, 1)] == [True, True, True, not one_long]


@pytest.mark.parametrize("only_launches", [False, True])
def test_a_long_prompt_waits_for_a_launch_only_if_that_is_short(
    decoding: Decoding, only_launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a launch is the step itself."""
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    monkeypatch.setattr(decoding.node.model, "only_launches", only_launches)
    decoding.reserve_fresh("new")
    decoding.core.prepare(decoding.now)
    said = [output.message for output in decoding.core.take_outputs() if isinstance(output, ToPrefill)]
    assert [type(message) for message in said] == ([] if only_launches else [Grant])


def test_slots_are_shared_out_after_the_launch(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a launch is possible, even if it is not due yet; else at once."""
    shared, due = list[int](), decoding.core.next_deadline()
    monkeypatch.setattr(decoding.core._credits, "share", lambda: shared.append(decoding.num_in_flight))
    assert due
    decoding.turn()
    assert shared == [1]
    decoding.wait_until(due)
    decoding.turn()
    assert shared == [1, 2]
    decoding.core.prepare(decoding.now)
    assert shared == [1, 2, 2], "nothing can be launched"
    decoding.core.compute(decoding.now)
    assert len(shared) == 3


def test_the_receiver_need_not_wake_an_engine_whose_step_will_end(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, told = Decoding(), list[bool]()
    monkeypatch.setattr(decoding.core.receiver, "polls_soon", told.append)
    decoding.core.handle(Abort(OLD), decoding.now)
    while decoding.num_in_flight:
        assert all(told)
        decoding.finish_step()
        decoding.turn()
    assert told[-1] is False
    decoding.commit(decoding.reserve())
    assert told[-1] is True


def test_steps_are_launched_early_while_a_long_prompt_is_on_its_way(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decoding.core.next_deadline() == pytest.approx(decoding.now + SHARE * STEP_S - SLACK_S)
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    message = Reserve(NEW, decoding.node.incarnation, 3 * BLOCK_SIZE, (), 1, 60.0, 60)
    decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    decoding.turn()
    assert decoding.num_in_flight == 2
    decoding.core.handle(Abort(NEW), decoding.now)
    decoding.wait_until(decoding.now + STEP_S)
    decoding.finish_step()
    decoding.turn()
    assert decoding.num_in_flight == 1, "there is time again"


def test_what_takes_long_begins_with_a_step_while_steps_are_launched_early(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tokens of a step do not wait for it; and of adoptions and grants, one with each step."""
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)

    def seen() -> tuple[int, int]:
        return len(decoding.grants), decoding.core.engine.num_running

    decoding.reserve_fresh("new")
    decoding.turn()
    decoding.turn()
    assert (decoding.num_in_flight, *seen()) == (2, 1, 1)
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)
    [lease] = decoding.core._reservations._leases.values()
    lease.arrived.update(range(lease.num_parts))
    commit = dataclasses.replace(decoding.commit_of(lease.serial), prompt_tokens=tuple(range(3 * BLOCK_SIZE)))
    decoding.core.handle(FromPeer("p", commit), decoding.now)
    decoding.reserve_fresh("other")
    for expected in ((1, 1), (1, 2), (2, 2)):
        for _ in range(3):
            decoding.turn()
            assert seen() == expected
        decoding.wait_until(decoding.now + STEP_S)
        decoding.finish_step()


def test_of_several_long_prompts_one_is_granted_or_adopted_with_each_step(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)

    def seen_with_steps(num_steps: int) -> list[tuple[int, int]]:
        seen = list[tuple[int, int]]()
        for _ in range(num_steps):
            for _ in range(3):
                decoding.turn()
            seen.append((len(decoding.grants), decoding.core.engine.num_running))
            decoding.wait_until(decoding.now + STEP_S)
            decoding.finish_step()
        return seen

    for name in "ab":
        decoding.reserve_fresh(name)
    assert seen_with_steps(2) == [(1, 1), (2, 1)]
    for serial, lease in decoding.core._reservations._leases.items():
        lease.arrived.update(range(lease.num_parts))
        commit = dataclasses.replace(decoding.commit_of(serial), attempt_id=lease.reserve.attempt_id)
        commit = dataclasses.replace(commit, prompt_tokens=tuple(range(3 * BLOCK_SIZE)))
        decoding.core.handle(FromPeer("p", commit), decoding.now)
    assert seen_with_steps(2) == [(2, 2), (2, 3)]


def test_the_first_long_prompt_waits_for_the_tokens_of_a_step_whose_successor_is_launched(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it came, nothing said that steps are launched early."""
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    decoding.wait_until(decoding.core.engine.launch_at or decoding.now)
    decoding.turn()
    assert decoding.num_in_flight == 2
    decoding.reserve_fresh("new")
    decoding.turn()
    assert not decoding.grants
    decoding.wait_until(decoding.now + STEP_S)
    decoding.finish_step()
    decoding.turn()
    assert len(decoding.grants) == 1


@pytest.mark.parametrize("is_early", [False, True])
def test_a_long_prompt_waits_for_tokens_after_which_the_next_step_is_launched_at_once(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """As of a sequence that does not run ahead: no step is in flight when its tokens are here. But after the second
    launch it has waited long enough."""
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", STEP_S)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    if is_early:
        monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    [sequence] = decoding.core.engine.scheduler._running
    sequence.runs_ahead = False
    seen = list[tuple[int, int]]()
    decoding.reserve_fresh("new")
    for _ in range(2):
        decoding.wait_until(decoding.now + STEP_S)
        decoding.finish_step()
        for _ in range(2):
            decoding.turn()
            seen.append((decoding.num_in_flight, len(decoding.grants)))
    assert seen == [(1, 0), (1, 0), (0, 0), (1, 1)]


def test_the_turn_that_grants_a_long_prompt_leaves_most_receives_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(num_slots=6)
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    monkeypatch.setattr(decode_node.turn_budget, "BLOCK_S", SLACK_S)  # not before the launch
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    message = Reserve(NEW, decoding.node.incarnation, 4 * PART_BLOCKS * BLOCK_SIZE, (), 1, 60.0, 60)
    decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    [grant] = decoding.grants
    assert (grant.num_parts, grant.credits) == (4, MIN_OPEN_PARTS)
    decoding.core.prepare(decoding.now)
    decoding.core.compute(decoding.now)
    [credit] = [output.message for output in decoding.core.take_outputs() if isinstance(output, ToPrefill)]
    assert isinstance(credit, Credit)
    assert credit == Credit(grant.lease, 3)


def test_a_long_prompt_has_all_its_credits_at_once_where_no_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn need follow."""
    decoding = Decoding(num_slots=6)
    monkeypatch.setattr(decode_node.leases, "LONG_BLOCKS", 0)
    monkeypatch.setattr(decoding.core.receiver.ranks[0].transport, "expect", lambda *_: None)
    monkeypatch.setattr(decoding.core._credits, "share", lambda: None)
    decoding.core.handle(Abort(OLD), decoding.now)
    while decoding.num_in_flight:
        decoding.finish_step()
        decoding.turn()
    message = Reserve(NEW, decoding.node.incarnation, 4 * PART_BLOCKS * BLOCK_SIZE, (), 1, 60.0, 60)
    decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    assert [grant.credits for grant in decoding.grants] == [3]
