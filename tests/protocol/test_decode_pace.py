"""A decode node that runs ahead launches a step late enough for newcomers, and tells the router when it does."""

from __future__ import annotations

import dataclasses

import pytest

import decode_node.leases
import decode_node.turn_budget
from baton.block_hash import chain
from baton.errors import DeadlineExceeded
from baton.handoff_messages import Commit, Credit, Grant, Reserve
from baton.messages import Abort, Adopted, AttemptId, End, Prefill, Sample, Tokens, UpdateKind
from baton.sampling import SamplingParams
from decode_node.core import DecodeCore
from decode_node.leases import Lease
from decode_node.reservations import MIN_OPEN_PARTS
from engine.pace import SHARE, SLACK_S
from node.events import FromPeer, FromRouter, PeerOpened, SessionOpened, ToPrefill, ToRouter
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, PART_BLOCKS
from tests.protocol.world import World

OLD, NEW = AttemptId(EPOCH, "old", 0), AttemptId(EPOCH, "new", 0)
PROMPT = tuple(range(2, 2 + 2 * BLOCK_SIZE))
ENDLESS = SamplingParams(max_tokens=50, ignore_eos=True)
STEP_S = 0.010


class Decoding:
    """A decode node at the steps of OLD, one of which has just begun; each takes STEP_S. NEW's KV is in its cache, so
    that a Commit is all that is missing."""

    def __init__(self, num_slots: int = 3) -> None:
        self.world = World(num_prefill=1, num_decode=2, num_slots=num_slots)
        self.node = next(node for node in self.world.nodes.values() if node.name == "decode-1")
        core = self.node.core
        assert isinstance(core, DecodeCore)
        self.core = core
        self.said: list[tuple[AttemptId, UpdateKind]] = []
        self.grants: list[Grant] = []
        self.again = False
        core.handle(SessionOpened(EPOCH), 0.0)
        core.handle(PeerOpened("p", PART_BLOCKS, core.receiver.layout), 0.0)
        core.handle(FromRouter(EPOCH, Prefill(OLD, self.node.incarnation, PROMPT, (Sample(0),), ENDLESS, 60.0)), 0.0)
        self.turn()
        for _ in range(5):
            self.wait_until(self.core.engine.launch_at or self.now)
            self.turn()
            began = self.core.device_busy_since
            assert began is not None
            self.wait_until(began + STEP_S)
            self.finish_step()
            self.turn()
        self.said.clear()

    @property
    def now(self) -> float:
        return self.world.now

    def wait_until(self, time: float) -> None:
        assert time >= self.now
        self.world.now = time

    @property
    def num_in_flight(self) -> int:
        return len(self.core.engine._in_flight)

    def turn(self) -> None:
        self.core.prepare(self.now)
        self.again = self.core.compute(self.now)
        self.core.check_integrity()
        for output in self.core.take_outputs():
            if isinstance(output, ToRouter):
                self.said.append((output.update.attempt_id, output.update.kind))
            elif isinstance(output, ToPrefill) and isinstance(output.message, Grant):
                self.grants.append(output.message)

    def finish_step(self) -> None:
        oldest = self.core.engine._in_flight[0].step
        while not oldest.is_done():
            self.node.model.advance()

    def reserve(self, deadline_s: float = 60.0) -> int:
        hashes = tuple(chain(PROMPT, BLOCK_SIZE))
        message = Reserve(NEW, self.node.incarnation, len(PROMPT), hashes, 1, deadline_s, 60)
        self.core.handle(FromPeer("p", message), self.now)
        self.turn()
        assert self.grants[-1].num_parts == 0
        return self.grants[-1].lease

    def reserve_fresh(self, name: str) -> None:
        """Ask for room for three blocks, of which none is here."""
        attempt_id = AttemptId(EPOCH, name, 0)
        message = Reserve(attempt_id, self.node.incarnation, 3 * BLOCK_SIZE, (), 1, 60.0, 60)
        self.core.handle(FromPeer("p", message), self.now)

    def commit(self, lease: int, age_s: float = 0.0, deadline_s: float = 60.0) -> None:
        self.core.handle(FromPeer("p", self.commit_of(lease, age_s, deadline_s)), self.now)
        self.turn()

    def commit_of(self, lease: int, age_s: float = 0.0, deadline_s: float = 60.0) -> Commit:
        samples = (Sample(0, (90,)),)
        return Commit(lease, NEW, self.node.incarnation, PROMPT, samples, ENDLESS, deadline_s, age_s=age_s)

    def told(self, kind: type) -> list[UpdateKind]:
        return [said for attempt_id, said in self.said if attempt_id == NEW and isinstance(said, kind)]


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


def test_slots_are_shared_out_after_the_launch(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a launch is possible, even if it is not due yet; else at once."""
    shared, due = list[int](), decoding.core.next_deadline()
    monkeypatch.setattr(decoding.core._reservations, "share_slots", lambda: shared.append(decoding.num_in_flight))
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
    decoding.core.handle(FromRouter(EPOCH, Abort(OLD)), decoding.now)
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
    decoding.core.handle(FromRouter(EPOCH, Abort(NEW)), decoding.now)
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
    monkeypatch.setattr(decoding.core._reservations, "share_slots", lambda: None)
    decoding.core.handle(FromRouter(EPOCH, Abort(OLD)), decoding.now)
    while decoding.num_in_flight:
        decoding.finish_step()
        decoding.turn()
    message = Reserve(NEW, decoding.node.incarnation, 4 * PART_BLOCKS * BLOCK_SIZE, (), 1, 60.0, 60)
    decoding.core.handle(FromPeer("p", message), decoding.now)
    decoding.turn()
    assert [grant.credits for grant in decoding.grants] == [3]


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
    said = [output.update for output in decoding.core.take_outputs() if isinstance(output, ToRouter)]
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
    decoding.core.handle(FromRouter(EPOCH, Abort(OLD)), decoding.now)
    decoding.turn()
    while decoding.num_in_flight != 0:
        decoding.finish_step()
        decoding.turn()
    decoding.commit(lease)
    assert len(decoding.told(Adopted)) == 1
    assert decoding.num_in_flight == 1


def test_an_abort_before_the_first_step_leaves_nothing_behind(decoding: Decoding) -> None:
    decoding.commit(decoding.reserve())
    decoding.core.handle(FromRouter(EPOCH, Abort(NEW)), decoding.now)
    decoding.core.handle(FromRouter(EPOCH, Abort(OLD)), decoding.now)
    decoding.turn()
    while decoding.num_in_flight:
        decoding.finish_step()
        decoding.turn()
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
    lease = Lease(1, reserve, "p", 99.0, 1.0, [], [], (1,), BLOCK_SIZE, [], (), [], commit=commit, committed=10.0)
    lease.last_arrived, lease.landed = arrived, landed
    launched = max(10.0, landed) + step_wait_s
    adopted = lease.adopted(launched)
    assert (adopted.transfer_s, adopted.scatter_s, adopted.step_wait_s) == (transfer_s, scatter_s, step_wait_s)
    assert adopted.handoff_s == 0.5 + launched - 10.0
    assert adopted.num_cached_tokens == BLOCK_SIZE
