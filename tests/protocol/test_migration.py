"""Requests that move between decode nodes: every state of a move, and everything that can go wrong in it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.errors import BatonError, InvalidRequest, Overloaded, PeerLost, RequestCancelled, TransferTimeout
from baton.handoff_messages import CommitReply, Grant, Landed, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, End, HandedOff, Migrate, Prefill, Sample, SampleEnd, Stayed
from baton.sampling import SamplingParams
from decode_node.core import DecodeCore
from decode_node.migration import MigrationState
from decode_node.migrations import REPLY_S
from node.events import FromPeer, PeerClosed, PeerOpened, SessionLost, TargetEvent
from node.handoffs.flights import STUCK_S
from tests.protocol.decoding import Decoding
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.leaving import LEASE, PROMPT, SAMPLING, WORK, Leaving
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, PART_BLOCKS
from tests.protocol.test_simulation import WINDOWS
from tests.protocol.world import World

REFUSED = Overloaded("no room")
BEFORE_COMMIT = ("asked", "copying", "stopping")
STATES = (*BEFORE_COMMIT, "committed", "accepted")


def leaving(state: str, ahead: bool = True) -> Leaving:
    """A node with a move in that state. Without steps launched ahead, STOPPING takes no time."""
    node = Leaving(ahead)
    node.migrate()
    if state == "asked":
        return node
    node.grant(num_credits=1 if state == "copying" else None)
    if state in ("copying", "stopping"):
        assert not node.commits
        return node
    node.until_committed()
    if state == "accepted":
        node.reply()
    return node


def goes_on(node: Leaving) -> None:
    """The request runs to its end here, as if nothing had been."""
    while not node.kinds(End):
        node.step()
    assert node.output == node.wanted
    assert len(node.kinds(SampleEnd)) == 1
    assert node.kinds(End) == [End()]
    node.run_out()


def is_over(node: Leaving, kind: type[BatonError]) -> None:
    """It has ended with that error, once, and nothing follows."""
    num_told = len(node.output)
    (end,) = node.kinds(End)
    assert isinstance(end, End)
    assert isinstance(end.error, kind)
    node.run_out()
    assert len(node.output) == num_told
    assert len(node.kinds(End)) == 1


# ---- as it should be ----


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_goes_on_here_until_only_the_rest_is_left_and_then_stops(ahead: bool) -> None:
    node = Leaving(ahead)
    node.migrate()
    (reserve,) = node.said
    assert isinstance(reserve, Reserve)
    assert reserve.goes_on, "it would be refused while newcomers wait at the target"
    known = reserve.num_tokens - reserve.num_spare_tokens
    assert reserve.move == 1
    assert len(reserve.block_hashes) == known // BLOCK_SIZE
    before = len(node.output)
    for _ in range(3):
        node.step()
    assert len(node.output) > before, "it waited for the grant"
    node.grant()
    commit = node.until_committed()
    assert list(commit.samples[0].output_tokens) == node.output
    assert known <= len(PROMPT) + len(node.output) - 1 <= reserve.num_tokens
    for _ in range(3):
        node.step()
    assert list(commit.samples[0].output_tokens) == node.output, "it went on after the Commit"
    node.receive()
    node.reply()
    assert not node.kinds(HandedOff), "parts that have left may still be lost"
    node.from_target(Landed(LEASE, WORK))
    assert len(node.kinds(HandedOff)) == 1
    assert not node.kinds(End)
    assert node.node.idle
    node.node.check_whole()


def test_room_that_a_request_leaves_that_has_moved_is_seen_in_the_same_turn() -> None:
    node = leaving("committed")
    core, layout = node.core, node.node.model.layout
    num_samples = core.engine.config.max_num_seqs
    reserve = Reserve(AttemptId(EPOCH, "s", 1), node.node.incarnation, 8, (), num_samples, 60.0, 12)
    node.hear(PeerOpened("p", PART_BLOCKS, layout), FromPeer("p", reserve))
    node.turn()
    assert core.load().num_waiting == 1
    node.reply()
    assert core.load().num_waiting == 0, "nobody would look"


def test_full_blocks_leave_while_the_request_goes_on() -> None:
    node = leaving("copying")
    assert node.node.out_staging_in_use == 1
    before = len(node.output)
    for _ in range(3):
        node.step()
    assert len(node.output) > before


# ---- what goes wrong ----


def test_a_request_stays_if_its_parts_go_nowhere() -> None:
    node = leaving("copying")
    node.world.now += STUCK_S
    node.turn()
    (stayed,) = node.kinds(Stayed)
    assert isinstance(stayed, Stayed)
    assert isinstance(stayed.error, PeerLost)
    goes_on(node)


@pytest.mark.parametrize(
    ("state", "ahead"), [*((state, True) for state in BEFORE_COMMIT), ("asked", False), ("copying", False)]
)
@pytest.mark.parametrize("what", ["refused", "peer lost", "part failed"])
def test_before_the_commit_the_request_stays_whatever_happens(state: str, ahead: bool, what: str) -> None:
    node = leaving(state, ahead)
    if what == "refused":
        node.from_target(Refuse(WORK, REFUSED))
    elif what == "peer lost":
        node.hear(TargetEvent(PeerClosed(node.target.incarnation, "gone")))
    else:
        node.world.hub.kill(node.target.transport.name)
    node.turn()
    (stayed,) = node.kinds(Stayed)
    assert isinstance(stayed, Stayed)
    assert stayed.move == 1
    goes_on(node)


@pytest.mark.parametrize("told_before", [False, True])
def test_a_refused_commit_gives_the_request_back(told_before: bool) -> None:
    """A lease that ends before the Commit comes there is refused twice."""
    node = leaving("committed")
    if told_before:
        node.from_target(Refuse(WORK, REFUSED))
        assert not node.kinds(Stayed), "the Commit may have been accepted before that"
    node.reply(REFUSED)
    assert len(node.kinds(Stayed)) == 1
    goes_on(node)


def test_a_lease_that_ended_before_the_commit_came_is_not_refused_once_more() -> None:
    """Its last part never got a credit, and nobody says again that none will come."""
    node = Leaving(ahead=True)
    node.migrate()
    node.grant()
    num_parts = node.num_granted
    node = Leaving(ahead=True)
    node.migrate()
    node.grant(num_credits=num_parts - 1)
    node.until_committed()
    node.from_target(Refuse(WORK, REFUSED))
    node.reply(REFUSED)
    while not node.kinds(End):
        node.step()
    node.receive()
    node.step()
    assert node.output == node.wanted
    assert node.node.idle
    node.node.check_whole()


@pytest.mark.parametrize("state", ["committed", "accepted"])
def test_a_target_lost_after_the_commit_may_have_the_request(state: str) -> None:
    node = leaving(state)
    node.hear(TargetEvent(PeerClosed(node.target.incarnation, "gone")))
    node.turn()
    is_over(node, PeerLost)


def test_a_commit_without_an_answer_ends_the_request() -> None:
    node = leaving("committed")
    node.world.now += REPLY_S
    deadline = node.core.next_deadline()
    assert deadline is not None
    assert deadline <= node.world.now
    node.turn()
    is_over(node, TransferTimeout)


@pytest.mark.parametrize("refusal", [Refuse(WORK, REFUSED), CommitReply(LEASE, WORK, REFUSED)])
def test_an_accepted_request_that_is_refused_later_is_not_taken_back(refusal: Refuse | CommitReply) -> None:
    node = leaving("accepted")
    node.from_target(refusal)
    is_over(node, Overloaded)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["abort", "session lost"])
def test_a_request_that_ends_takes_its_move_with_it(state: str, how: str) -> None:
    node = leaving(state)
    node.hear(Abort(WORK) if how == "abort" else SessionLost(EPOCH))
    node.turn()
    assert any(isinstance(said, Release) for said in node.said)
    assert not node.kinds(Stayed)
    if how == "abort":
        is_over(node, RequestCancelled)
    else:
        node.run_out()


def test_the_last_token_ends_the_move() -> None:
    node = leaving("asked")
    goes_on(node)
    assert any(isinstance(said, Release) for said in node.said)


@pytest.mark.parametrize("state", STATES)
def test_repeats_and_what_comes_late_change_nothing(state: str) -> None:
    node = leaving(state)
    said, told = list(node.said), len(node.kinds(Stayed))
    node.migrate()  # the same move
    late: list[Grant | CommitReply | Landed] = [CommitReply(99, WORK, REFUSED), Landed(99, WORK)]
    if state != "asked":
        late.append(Grant(WORK, LEASE, 0, 3, 3))
    node.from_target(*late)
    assert [message for message in node.said if isinstance(message, Reserve)] == [said[0]]
    assert len(node.kinds(Stayed)) == told
    assert not node.kinds(End)


def test_a_grant_after_the_end_of_a_move_is_released_and_used_up() -> None:
    node = leaving("asked")
    node.from_target(Refuse(WORK, REFUSED))
    node.grant(num_credits=2)
    assert node.said[-1] == Release(WORK)
    goes_on(node)


def test_a_request_that_outruns_its_room_stays_and_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.migration.SPARE_TOKENS", 4)
    node = leaving("asked")
    while not node.kinds(Stayed):
        node.step()
    assert len(node.output) < SAMPLING.max_tokens
    node.migrate(move=2)
    assert [message.move for message in node.said if isinstance(message, Reserve)] == [1, 2]
    goes_on(node)


def test_a_request_that_is_moving_already_is_not_moved_to_somebody_else() -> None:
    node = leaving("asked")
    node.migrate(move=2)
    (stayed,) = node.kinds(Stayed)
    assert isinstance(stayed, Stayed)
    assert (stayed.move, type(stayed.error)) == (2, InvalidRequest)
    goes_on(node)


def test_a_request_does_not_move_to_a_node_that_is_being_disconnected() -> None:
    node = leaving("asked")
    node.target.kill()
    node.turn()
    node.migrate(move=2)
    stayed = [told for told in node.kinds(Stayed) if isinstance(told, Stayed)]
    assert [(told.move, type(told.error)) for told in stayed] == [(1, PeerLost), (2, PeerLost)]
    assert [type(message) for message in node.said] == [Reserve, Release]


@pytest.mark.parametrize(("n", "num_steps", "error"), [(1, 0, Overloaded), (2, 6, InvalidRequest)])
def test_a_request_that_cannot_move_is_answered_at_once(n: int, num_steps: int, error: type[BatonError]) -> None:
    """Its prompt is not computed, or it has two answers. Without an answer the router would never ask again."""
    decoding = Decoding()
    work = decoding.prefill("r", n=n)
    for _ in range(num_steps):
        decoding.turn()
        decoding.node.advance_device()
    assert bool(decoding.output(0, work)) is (num_steps > 0)
    decoding.hear(Migrate(work, 1, DecodeTarget("there", "target")))
    decoding.turn()
    (stayed,) = decoding.kinds(Stayed, work)
    assert isinstance(stayed, Stayed)
    assert (stayed.move, type(stayed.error)) == (1, error)


@pytest.mark.parametrize("state", ["asked", "copying"])
def test_a_request_that_is_preempted_stays(state: str) -> None:
    """Its target would keep room for it until it is computed again."""
    node = leaving(state)
    for number in range(3):
        urgent, prompt = AttemptId(EPOCH, f"urgent {number}", 0), tuple(range(number, number + 43))
        told = Prefill(urgent, node.node.incarnation, prompt, (Sample(0),), SAMPLING, 60.0, priority=-1)
        node.hear(told)
    while not node.kinds(Stayed):
        node.step()
    (stayed,) = node.kinds(Stayed)
    assert isinstance(stayed, Stayed)
    assert isinstance(stayed.error, Overloaded)
    assert node.said[-1] == Release(WORK)
    goes_on(node)


def test_a_lease_that_ends_before_the_commit_is_no_end_of_the_request() -> None:
    """Its old node goes on with it, and tells the router."""
    target = Decoding()
    target.reserve(move=1, num_spare_tokens=2, block_hashes=(), deadline_s=5.0)
    assert target.grants
    target.world.now += 6.0
    target.turn()
    assert [type(said) for said in target.said] == [Grant, Refuse]
    assert target.told == []


# ---- between real nodes ----


@pytest.mark.parametrize("how", ["crash", "break_session"])
@pytest.mark.parametrize("num_acts", range(0, 40, 4))
def test_a_target_that_is_lost_costs_one_more_attempt_at_most(how: str, num_acts: int) -> None:
    """At any moment of a move: none, if it dies while the request still belongs to its old node."""
    world, draw = World(num_prefill=1, num_blocks=60), random.Random(5)
    world.run_dry()  # until the router knows its nodes
    client = world.clients[world.submit(PROMPT, 1, SAMPLING)]
    (attempt,) = client.state.attempts.values()
    while attempt.target is None:
        world.act(draw.choice(world.enabled()))
        if len(client.got[0]) > 2:
            world.act(("move", attempt.generates_on))
    old, new = attempt.generates_on, attempt.target
    for _ in range(num_acts):
        world.act(draw.choice(world.enabled()))
    core = world.nodes[old].core
    assert isinstance(core, DecodeCore)
    move = core._migrations._sendings.get(attempt.id)
    is_old_nodes = move is not None and move.state is not MigrationState.COMMITTED
    world.act((how, new))
    while acts := world.enabled():
        world.act(draw.choice(acts))
    world.run_dry()
    world.check_whole()
    assert client.end
    assert client.end.error is None
    assert client.got == client.want
    assert client.end.timings.num_attempts <= (1 if how == "crash" and is_old_nodes else 2)


def run(seed: int, faults: float, num_acts: int = 220, windows: tuple[int | None, ...] = (None, None)) -> World:
    """Streams on decode nodes that are emptied again and again."""
    draw = random.Random(seed)
    num_blocks, num_slots, num_decode = draw.choice([26, 60]), draw.choice([1, 2, 4]), draw.choice([2, 3])
    num_blocks += 22 * (len(set(windows)) - 1)
    world = World(num_blocks=num_blocks, num_slots=num_slots, num_decode=num_decode, windows=windows)
    for number in range(num_acts):
        if number < num_acts / 2 and draw.random() < 0.08:
            prompt = tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(1, 30)))
            sampling = SamplingParams(seed=draw.randrange(9), max_tokens=draw.randint(8, 34), ignore_eos=True)
            world.submit(prompt, draw.choice([1, 1, 1, 2]), sampling)
        if draw.random() < 0.2 and (moves := [act for act in world.faults() if act[0] == "move"]):
            world.act(draw.choice(moves))
        world.act_at_random(draw, faults)
    world.run_dry()
    world.check_whole()
    return world


def test_moved_requests_are_whole_and_nothing_is_computed_twice() -> None:
    outcomes = Counter[str]()
    for seed in (0, 5, 6):  # in which several move
        world = run(seed, faults=0.0)
        outcomes.update(world.router.num_migrations())
        for client in world.clients.values():
            assert client.end
            assert client.end.error is None
            assert client.end.timings.num_attempts == 1
            assert client.got == client.want
    assert outcomes["moved"] > 2
    assert not outcomes["lost"]


@pytest.mark.parametrize("windows", [(None, 6), (9, 9)])
def test_what_falls_behind_a_window_while_it_is_copied_is_not_missed(windows: tuple[int | None, ...]) -> None:
    """It goes on while it is copied, and gives back what the new node was told that it would get."""
    world = run(9, faults=0.0, windows=windows)
    assert world.router.num_migrations()["moved"] > 1
    assert all(client.end and client.got == client.want for client in world.clients.values())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 60))
def test_with_faults_and_windows_nothing_is_lost(seed: int) -> None:
    run(seed, faults=0.04, windows=WINDOWS[seed % len(WINDOWS)])


@pytest.mark.parametrize("seed", [10, 11, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 60))])
def test_with_faults_nothing_is_lost(seed: int) -> None:
    run(seed, faults=0.04)
