"""A decode node that runs ahead launches a step late enough for newcomers, and tells the router when it does."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import DeadlineExceeded
from baton.handoff_messages import Commit, Reserve
from baton.messages import Abort, Adopted, AttemptId, End, Prefill, Sample, Tokens, Update
from decode_node.leases import Lease
from engine.pace import SHARE, SLACK_S
from node.events import FromPeer
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE
from tests.protocol.paced_decoding import ENDLESS, NEW, OLD, PROMPT, STEP_S, Decoding


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


def test_the_next_step_is_put_off_until_shortly_before_the_end(decoding: Decoding) -> None:
    assert decoding.num_in_flight == 1
    due = decoding.core.next_deadline()
    assert due
    assert due == pytest.approx(decoding.now + SHARE * STEP_S - SLACK_S)
    decoding.turn()
    assert not decoding.again, "it would turn round and round"
    assert decoding.num_in_flight == 1
    decoding.wait_until(due)
    decoding.turn()
    assert decoding.num_in_flight == 2
    later = decoding.core.next_deadline()
    assert later is None or later > decoding.now + 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_who_comes_while_a_step_runs_is_in_the_next_one(decoding: Decoding, share: float) -> None:
    lease, began, due = decoding.reserve(), decoding.now, decoding.core.next_deadline()
    assert due
    decoding.wait_until(began + share * STEP_S)
    decoding.commit(lease, age_s=0.003)
    decoding.wait_until(due)
    decoding.turn()
    assert decoding.num_in_flight == 2
    (adopted,) = decoding.told(Adopted)
    assert isinstance(adopted, Adopted)
    assert adopted.commit_s == 0.003
    assert adopted.transfer_s == adopted.scatter_s == 0
    assert adopted.step_wait_s == pytest.approx(due - began - share * STEP_S)
    assert adopted.handoff_s == pytest.approx(0.003 + adopted.step_wait_s)
    assert adopted.num_cached_tokens == len(PROMPT)
    decoding.wait_until(began + STEP_S)
    decoding.finish_step()
    decoding.turn()
    assert decoding.told(Tokens) == []
    decoding.finish_step()
    decoding.turn()
    (tokens,) = decoding.told(Tokens)
    assert isinstance(tokens, Tokens)
    assert tokens.first_index == 1


def test_a_first_token_does_not_wait_for_the_launch(decoding: Decoding) -> None:
    """The router may hold it until the request is adopted, and a launch takes as long as a third of a step."""
    lease = decoding.reserve()
    due = decoding.core.next_deadline()
    assert due
    decoding.wait_until(due)
    decoding.core.handle(FromPeer("p", decoding.commit_of(lease)), decoding.now)
    decoding.core.prepare(decoding.now)
    said = [output for output in decoding.core.take_outputs() if isinstance(output, Update)]
    assert [type(update.kind) for update in said if update.attempt_id == NEW] == [Adopted]
    assert decoding.num_in_flight == 1, "the step is launched already"


def test_a_step_that_ends_before_it_was_expected_is_followed_at_once(decoding: Decoding) -> None:
    lease = decoding.reserve()
    decoding.commit(lease)
    decoding.wait_until(decoding.now + 0.2 * STEP_S)
    decoding.finish_step()
    decoding.turn()
    assert len(decoding.told(Adopted)) == 1
    assert decoding.num_in_flight == 1


def test_nothing_runs_and_nothing_is_put_off() -> None:
    decoding = Decoding()
    lease = decoding.reserve()
    decoding.core.handle(Abort(OLD), decoding.now)
    decoding.finish_all()
    decoding.commit(lease)
    assert len(decoding.told(Adopted)) == 1
    assert decoding.num_in_flight == 1


def test_an_abort_before_the_first_step_leaves_nothing_behind(decoding: Decoding) -> None:
    decoding.commit(decoding.reserve())
    decoding.core.handle(Abort(NEW), decoding.now)
    decoding.core.handle(Abort(OLD), decoding.now)
    decoding.finish_all()
    check_nothing_is_left(decoding)


def check_nothing_is_left(decoding: Decoding) -> None:
    assert decoding.told(Adopted) == []
    assert len(decoding.told(End)) == 1
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


def test_a_deadline_before_the_first_step_is_kept(decoding: Decoding) -> None:
    decoding.commit(decoding.reserve(), deadline_s=0.002)
    assert decoding.core.next_deadline() == pytest.approx(decoding.now + 0.002)
    decoding.wait_until(decoding.now + 0.002)
    decoding.turn()
    (end,) = decoding.told(End)
    assert isinstance(end, End)
    assert isinstance(end.error, DeadlineExceeded)
    assert decoding.told(Adopted) == []


@pytest.mark.parametrize(
    ("arrived", "landed", "transfer_s", "scatter_s", "step_wait_s"),
    [
        (7.0, 8.0, 0.0, 0.0, 5.0),  # all was hidden behind the prompt's computing
        (9.0, 12.0, 2.0, 2.0, 3.0),
        (13.0, 14.0, 4.0, 1.0, 1.0),
    ],
)
def test_what_happens_before_the_commit_takes_no_time(
    arrived: float, landed: float, transfer_s: float, scatter_s: float, step_wait_s: float
) -> None:
    """The Commit comes at 10.0, the first step is launched at 15.0, or when it can be."""
    reserve = Reserve(NEW, "i", 8, (), 1, 60.0, 60)
    commit = Commit(1, NEW, "i", PROMPT, (Sample(0, (90,)),), ENDLESS, 60.0, age_s=0.5)
    lease = Lease(1, reserve, "p", 99.0, 1.0, [], [], BLOCK_SIZE, [], (), [], commit=commit, committed=10.0)
    lease.last_arrived, lease.landed = arrived, landed
    launched = max(10.0, landed) + step_wait_s
    adopted = lease.adopted(launched)
    assert (adopted.transfer_s, adopted.scatter_s, adopted.step_wait_s) == (transfer_s, scatter_s, step_wait_s)
    assert adopted.handoff_s == 0.5 + launched - 10.0
    assert adopted.num_cached_tokens == BLOCK_SIZE


class Filling:
    """NEW joins a step that is launched before it begins, beside the first chunk of a local prompt, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target_s: float | None, prompt: bool = True) -> None:
        self.decoding = decoding = Decoding()
        config = dataclasses.replace(decoding.core.engine.config, target_itl_s=target_s)
        monkeypatch.setattr(decoding.core.engine, "config", config)
        lease = decoding.reserve()
        if prompt:
            local = AttemptId(EPOCH, "local", 0)
            message = Prefill(local, decoding.node.incarnation, PROMPT, (Sample(0),), ENDLESS, 60.0)
            decoding.core.handle(message, decoding.now)
        decoding.core.handle(FromPeer("p", decoding.commit_of(lease)), decoding.now)
        decoding.wait_until(decoding.core.engine.launch_at or decoding.now)
        decoding.turn()
        assert decoding.num_in_flight == 2


@pytest.mark.parametrize(("target_s", "prompt"), [(None, True), (0.020, False)])
def test_a_first_token_does_not_wait_for_a_step_that_is_short_or_has_no_target(
    target_s: float | None, prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(Filling(monkeypatch, target_s, prompt).decoding.told(Adopted)) == 1


def test_a_first_token_waits_for_the_begin_of_a_step_as_long_as_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Filling(monkeypatch, 0.020).decoding
    launched = decoding.now
    assert decoding.told(Adopted) == []
    decoding.turn()
    assert decoding.told(Adopted) == [], "the step before it has not ended"
    decoding.wait_until(launched + 0.004)
    decoding.finish_step()
    decoding.turn()
    (adopted,) = decoding.told(Adopted)
    assert isinstance(adopted, Adopted)
    assert adopted.step_wait_s >= 0.004
    assert decoding.told(Tokens) == []
    decoding.finish_step()
    decoding.turn()
    assert [len(decoding.told(kind)) for kind in (Adopted, Tokens)] == [1, 1]


def test_a_first_token_does_not_wait_if_no_step_is_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding()
    config = dataclasses.replace(decoding.core.engine.config, target_itl_s=0.020)
    monkeypatch.setattr(decoding.core.engine, "config", config)
    lease = decoding.reserve()
    decoding.core.handle(Abort(OLD), decoding.now)
    decoding.finish_all()
    message = Prefill(AttemptId(EPOCH, "local", 0), decoding.node.incarnation, PROMPT, (Sample(0),), ENDLESS, 60.0)
    decoding.core.handle(message, decoding.now)
    decoding.commit(lease)
    assert len(decoding.told(Adopted)) == 1
    assert decoding.num_in_flight == 1


def test_an_abort_between_launch_and_begin_of_the_first_step_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = Filling(monkeypatch, 0.020).decoding
    for attempt_id in (NEW, OLD, AttemptId(EPOCH, "local", 0)):
        decoding.core.handle(Abort(attempt_id), decoding.now)
    decoding.finish_all()
    check_nothing_is_left(decoding)
