"""What a decode node runs once it is committed, and gives back: one rule at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PeerLost,
    RequestCancelled,
)
from baton.handoff_messages import Commit
from baton.messages import Abort, Adopted, SampleEnd
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from kv_transfer.parts import tag_of
from node.events import FromPeer, PeerClosed, PeerOpened
from node.structured_output.matchers import Matchers
from tests.engine.test_token_matchers import Ends
from tests.protocol.decoding import (
    PEER,
    PROMPT,
    SAMPLING,
    WANT,
    WORK,
    Decoding,
    ends,
    first_tokens,
    hand_over,
    named,
    refusals,
)
from tests.protocol.node import MAX_MODEL_LEN, PART_BLOCKS


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


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
