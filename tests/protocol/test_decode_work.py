"""What a decode node takes, grants, runs and gives back: one rule at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from baton.errors import (
    BatonError,
    CacheExhausted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    RequestCancelled,
)
from baton.handoff_messages import Commit, Grant, Refuse, Release
from baton.messages import Abort, Adopted, AttemptId, End, SampleEnd
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from kv_transfer.parts import tag_of
from node.events import Draining, FromPeer, PeerClosed, PeerOpened, SessionLost, ToPrefill
from node.structured_output.matchers import Matchers
from tests.engine.test_token_matchers import Ends
from tests.protocol.decoding import PEER, PROMPT, SAMPLING, WORK, Decoding
from tests.protocol.fake_model import expected_output
from tests.protocol.network import EPOCH
from tests.protocol.node import MAX_MODEL_LEN, MAX_NUM_SEQS, PART_BLOCKS

WANT = [expected_output(PROMPT, SAMPLING, sample, MAX_MODEL_LEN)[0] for sample in range(MAX_NUM_SEQS)]


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


def named(number: int) -> AttemptId:
    return AttemptId(EPOCH, f"r{number}", 0)


def refusals(decoding: Decoding) -> list[type[BatonError]]:
    return [type(message.error) for message in decoding.said if isinstance(message, Refuse)]


def ends(decoding: Decoding, attempt_id: AttemptId = WORK) -> list[type[BatonError] | None]:
    found = decoding.kinds(End, attempt_id)
    return [type(end.error) if end.error else None for end in found]  # type: ignore[attr-defined]


def first_tokens(*samples: int) -> dict[int, tuple[int, ...]]:
    return {sample: (WANT[sample][0],) for sample in samples}


def hand_over(decoding: Decoding, n: int = 1, **fields: Any) -> None:
    """WORK, all of it: granted, its parts sent, committed with `n` samples."""
    decoding.reserve(n=n)
    decoding.send(decoding.grants[-1])
    decoding.commit(decoding.grants[-1], first_tokens(*range(n)), **fields)


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


# ---- commits ----


def test_who_runs_is_committed_and_has_all_its_parts(decoding: Decoding) -> None:
    decoding.reserve()
    (grant,) = decoding.grants
    decoding.send(grant, pieces=slice(1))
    decoding.turn()
    decoding.commit(grant, first_tokens(0))
    decoding.run()
    assert not decoding.kinds(Adopted)
    decoding.send(grant, pieces=slice(1, None))
    decoding.run()
    assert len(decoding.kinds(Adopted)) == 1
    assert decoding.output(0) == WANT[0][1:]
    assert ends(decoding) == [None]


def test_a_request_that_is_all_here_runs_without_its_prefill_node(decoding: Decoding) -> None:
    """It may have stopped after its work, while a step ran here: all that comes during a step is one turn's."""
    decoding.reserve()
    (grant,) = decoding.grants
    decoding.send(grant, pieces=slice(1))
    decoding.commit(grant, first_tokens(0))
    decoding.send(grant, pieces=slice(1, None))
    decoding.hear(PeerClosed(PEER, "the node was stopped"))
    decoding.run()
    assert len(decoding.kinds(Adopted)) == 1
    assert decoding.output(0) == WANT[0][1:]
    assert ends(decoding) == [None]
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


def test_a_part_that_fails_by_itself_ends_its_lease(decoding: Decoding) -> None:
    """The peer sends more than was granted, and stays connected."""
    decoding.reserve()
    (grant,) = decoding.grants
    decoding._sender.transport.push(decoding.node.incarnation, tag_of(grant.lease, 0), 0, 1 << 30, b"")
    decoding.hub.deliver_all()
    decoding.turn()
    assert refusals(decoding) == ends(decoding) == [PeerLost]
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


def test_parts_without_a_commit_run_nothing(decoding: Decoding) -> None:
    decoding.reserve()
    decoding.send(decoding.grants[0])
    decoding.run()
    assert not decoding.told
    assert not decoding.core.idle


@pytest.mark.parametrize(
    ("samples", "prompt"),
    [(first_tokens(0, 1), PROMPT), (first_tokens(0), PROMPT[:-1]), ({0: (5, 6)}, PROMPT)],
    ids=["more samples", "another prompt", "more tokens"],
)
def test_a_commit_of_something_else_than_was_reserved_ends_the_lease(
    decoding: Decoding, samples: dict[int, tuple[int, ...]], prompt: tuple[int, ...]
) -> None:
    decoding.reserve()
    decoding.commit(decoding.grants[0], samples, prompt)
    assert isinstance(decoding.replies[0].error, InternalError)
    assert ends(decoding) == [InternalError]
    assert decoding.node.pool_is_whole()


def test_a_commit_is_answered_the_same_twice_also_after_its_lease(decoding: Decoding) -> None:
    hand_over(decoding)
    decoding.commit(decoding.grants[0], first_tokens(0))
    decoding.run()
    assert ends(decoding) == [None]
    decoding.commit(decoding.grants[0], first_tokens(0))
    assert [reply.error for reply in decoding.replies] == [None, None, None]


def test_another_prefill_node_commits_nothing(decoding: Decoding) -> None:
    decoding.reserve()
    (grant,) = decoding.grants
    commit = Commit(grant.lease, WORK, decoding.node.incarnation, PROMPT, (), SAMPLING, 60.0)
    decoding.hear(PeerOpened("another", PART_BLOCKS, decoding.node.model.layout), FromPeer("another", commit))
    decoding.turn()
    assert isinstance(decoding.replies[0].error, RequestCancelled)
    decoding.send(grant)
    decoding.commit(grant, first_tokens(0))
    assert decoding.replies[1].error is None


# ---- running, and its end ----


def test_samples_that_ended_before_are_left_out_and_hold_nothing(decoding: Decoding) -> None:
    decoding.reserve(n=3)
    decoding.send(decoding.grants[0])
    decoding.commit(decoding.grants[0], first_tokens(0, 2))
    decoding.run()
    assert [decoding.output(sample) for sample in range(3)] == [WANT[0][1:], [], WANT[2][1:]]
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()
    assert decoding.core.engine.scheduler.num_reserved_seqs == 0


@pytest.mark.parametrize("stopped", [(1,), (0, 1)])
def test_samples_that_are_stopped_before_their_parts_are_in_never_run(
    decoding: Decoding, stopped: tuple[int, ...]
) -> None:
    decoding.reserve(n=2)
    decoding.commit(decoding.grants[0], first_tokens(0, 1))
    decoding.hear(Abort(WORK, stopped))
    decoding.send(decoding.grants[0])
    decoding.turn()
    assert decoding.core.engine.num_running == 2 - len(stopped)
    decoding.run()
    assert decoding.output(1) == []
    assert decoding.output(0) == ([] if 0 in stopped else WANT[0][1:])
    assert ends(decoding) == [None]
    assert decoding.node.pool_is_whole()


def test_a_sample_that_is_stopped_while_its_prompt_stands_for_several_says_nothing(decoding: Decoding) -> None:
    attempt_id = decoding.prefill("local", n=3)
    decoding.turn()
    decoding.hear(Abort(attempt_id, (1,)))
    decoding.run()
    assert [decoding.output(sample, attempt_id) for sample in range(3)] == [WANT[0], [], WANT[2]]
    assert [end.sample for end in decoding.kinds(SampleEnd, attempt_id)] == [0, 2]  # type: ignore[attr-defined]
    assert decoding.core.idle


def test_an_abort_frees_all_samples_at_once(decoding: Decoding) -> None:
    hand_over(decoding, n=3)
    assert decoding.core.engine.num_running == 3
    decoding.hear(Abort(WORK))
    decoding.turn()
    assert ends(decoding) == [RequestCancelled]
    decoding.run()
    assert decoding.node.pool_is_whole()


def test_the_deadline_is_what_the_commit_says_is_left(decoding: Decoding) -> None:
    decoding.reserve()
    decoding.world.now = 3.0
    decoding.commit(decoding.grants[0], first_tokens(0), deadline_s=20.0)
    assert decoding.core.next_deadline() == 23.0
    decoding.send(decoding.grants[0])
    decoding.turn()
    assert decoding.core.engine.num_running == 1
    decoding.world.now = 22.9
    decoding.turn()
    assert not ends(decoding)
    decoding.world.now = 23.0
    decoding.turn()
    assert ends(decoding) == [DeadlineExceeded]


class Breaks:
    """Stands for `Grammars`: its matchers break at the output's third token."""

    def matcher(self, structured: StructuredOutput, output: Iterable[int] = ()) -> Ends:
        matcher = Ends(after=MAX_MODEL_LEN, breaks_at=WANT[0][2])
        return matcher.fork(output)


def test_an_output_that_no_token_can_follow_ends_its_request(decoding: Decoding) -> None:
    decoding.core._matchers = Matchers(Breaks())  # type: ignore[arg-type]
    structured = StructuredOutput(StructuredKind.REGEX, "a")
    hand_over(decoding, sampling=dataclasses.replace(SAMPLING, structured_outputs=structured))
    decoding.run()
    assert ends(decoding) == [InvalidRequest]
    assert decoding.core.idle


class Forces(Breaks):
    """Its matchers leave one token, twice in a row."""

    def matcher(self, structured: StructuredOutput, output: Iterable[int] = ()) -> Ends:
        class ForcesTwo(Ends):
            def forced(self) -> list[int]:
                return [5, 6]

        return ForcesTwo(after=MAX_MODEL_LEN)


def test_a_sample_that_was_stopped_before_its_prompt_came_ends_once_with_all_tokens_of_a_step(
    decoding: Decoding,
) -> None:
    decoding.core._matchers = Matchers(Forces())  # type: ignore[arg-type]
    decoding.hear(Abort(named(0), (0,)))
    attempt_id = decoding.prefill("r0", structured_outputs=StructuredOutput(StructuredKind.REGEX, "a"))
    decoding.run()
    assert decoding.output(0, attempt_id) == []
    assert ends(decoding, attempt_id) == [None]
    assert decoding.core.idle
