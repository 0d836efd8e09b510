"""What a prefill node takes, what it lets go, and what it tells its decode node: one rule at a time."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest

from baton.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, PeerLost, RequestCancelled
from baton.handoff_messages import Commit, CommitReply, Credit, Grant, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, Prefill, Sample
from baton.sampling import SamplingParams
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from kv_transfer.parts import PartHeader, tag_of
from kv_transfer.staging import SlotOwner
from node.events import Draining, FromPeer, PeerClosed, SessionLost
from node.structured_output.grammar_state import GrammarState
from node.structured_output.grammars import GrammarMatcher, Grammars
from node.structured_output.matchers import Matchers
from tests.protocol.fake_model import NUM_LAYERS, next_token
from tests.protocol.network import EPOCH
from tests.protocol.test_prefill_rules import PROMPT, WORK, Prefilling

NUM_PARTS = 3
"""Of PROMPT, without a prefix: its first step's blocks, and the last one's by two groups of layers."""


@pytest.fixture
def prefilling() -> Prefilling:
    return Prefilling()


def send(prefilling: Prefilling, attempt_id: AttemptId = WORK, **fields: object) -> None:
    """A Prefill, and a turn."""
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    target = DecodeTarget("address", prefilling.peer)
    plain = Prefill(attempt_id, prefilling.node.incarnation, PROMPT[:10], (Sample(0),), sampling, 60.0, target)
    prefill = dataclasses.replace(plain, **fields)  # type: ignore[arg-type]
    prefilling.node.core.handle(prefill, 1.0)
    prefilling.turn()


def hear(prefilling: Prefilling, *messages: object) -> None:
    """What the decode node says, and a turn."""
    for message in messages:
        prefilling.node.core.handle(FromPeer(prefilling.peer, message), 1.5)  # type: ignore[arg-type]
    prefilling.turn()


def run(prefilling: Prefilling) -> None:
    """Until the device has nothing left to do."""
    while prefilling.node.model.is_busy:
        prefilling.compute(1)


def of(kind: type, prefilling: Prefilling) -> list[object]:
    return [message for message in prefilling.said if isinstance(message, kind)]


def errors(prefilling: Prefilling) -> list[type | None]:
    return [type(end.error) if end.error else None for end in prefilling.ends]


# ---- what is taken ----


def test_work_for_an_earlier_life_is_refused(prefilling: Prefilling) -> None:
    send(prefilling, target_incarnation="earlier")
    assert errors(prefilling) == [NodeUnavailable]
    assert prefilling.node.core.idle


def test_a_node_that_drains_takes_nothing_new(prefilling: Prefilling) -> None:
    prefilling.node.core.handle(Draining(), 1.0)
    send(prefilling)
    assert errors(prefilling) == [NodeUnavailable]


def test_an_attempt_is_taken_once(prefilling: Prefilling) -> None:
    send(prefilling)
    send(prefilling)
    assert len(of(Reserve, prefilling)) == 1
    prefilling.node.core.handle(Abort(WORK), 1.0)
    send(prefilling)
    assert len(of(Reserve, prefilling)) == 1
    assert errors(prefilling) == [RequestCancelled]


def test_a_higher_attempt_ends_those_below(prefilling: Prefilling) -> None:
    send(prefilling)
    send(prefilling, WORK._replace(attempt=2))
    assert errors(prefilling) == [RequestCancelled]
    assert of(Release, prefilling) == [Release(WORK)]
    run(prefilling)
    assert [reserve.attempt_id.attempt for reserve in of(Reserve, prefilling)] == [1, 2]  # type: ignore[attr-defined]


def test_a_reserve_has_the_priority_of_its_prompt_and_its_age(prefilling: Prefilling) -> None:
    send(prefilling, priority=-5, age_s=1.5)
    (reserve,) = of(Reserve, prefilling)
    assert (reserve.priority, reserve.age_s) == (-5, 2.5), "and a second here"  # type: ignore[attr-defined]


@pytest.mark.parametrize("output", [(), (7,)])
def test_a_reserve_says_whether_the_answer_has_begun(prefilling: Prefilling, output: tuple[int, ...]) -> None:
    send(prefilling, samples=(Sample(0, output),))
    (reserve,) = of(Reserve, prefilling)
    assert reserve.goes_on is bool(output)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("aborted", "is_taken"), [(0, True), (1, False), (2, False)])
def test_an_abort_leaves_a_tombstone(prefilling: Prefilling, aborted: int, is_taken: bool) -> None:
    prefilling.node.core.handle(Abort(WORK._replace(attempt=aborted)), 0.5)
    send(prefilling)
    assert bool(of(Reserve, prefilling)) is is_taken
    assert prefilling.node.core.idle is not is_taken


def test_samples_that_are_stopped_leave_the_prompt_to_the_others(prefilling: Prefilling) -> None:
    send(prefilling, samples=(Sample(0), Sample(1)))
    prefilling.node.core.handle(Abort(WORK, (0,)), 1.0)
    prefilling.turn()
    assert not prefilling.ends


def test_the_queue_is_bounded_and_load_tells_who_waits(prefilling: Prefilling) -> None:
    prefilling.node.core._max_waiting = 1
    for number in range(3):  # the first runs, the second waits
        send(prefilling, AttemptId(EPOCH, f"r{number}", 0))
    assert errors(prefilling) == [Overloaded]
    load = prefilling.node.core.load()
    assert (load.num_waiting, load.num_running) == (1, 1)


def test_an_answer_that_has_begun_is_never_refused_for_the_queue(prefilling: Prefilling) -> None:
    """All streams of a decode node that dies come at once, and none may end for that."""
    prefilling.node.core._max_waiting = 1
    for number in range(3):
        send(prefilling, AttemptId(EPOCH, f"r{number}", 1), samples=(Sample(0, (7,)),))
    assert not prefilling.ends
    send(prefilling, AttemptId(EPOCH, "new", 1))
    assert errors(prefilling) == [Overloaded]


def test_the_work_of_a_router_that_is_gone_ends(prefilling: Prefilling) -> None:
    send(prefilling)
    prefilling.node.core.handle(SessionLost(EPOCH), 1.5)
    prefilling.turn()
    assert of(Release, prefilling) == [Release(WORK)]
    run(prefilling)
    assert prefilling.node.core.idle
    assert prefilling.node.pool_is_whole()


def test_a_deadline_counts_from_receipt_and_is_told_as_what_is_left(prefilling: Prefilling) -> None:
    send(prefilling, prompt_tokens=PROMPT)  # received at 1.0, started at 2.0
    prefilling.world.now = 11.0
    run(prefilling)
    hear(prefilling, Grant(WORK, 1, 0, NUM_PARTS, 0))
    (reserve,), (commit,) = of(Reserve, prefilling), of(Commit, prefilling)
    assert isinstance(reserve, Reserve)
    assert isinstance(commit, Commit)
    assert (reserve.deadline_s, commit.deadline_s) == (59.0, 50.0)
    assert prefilling.node.core.next_deadline() == 61.0
    prefilling.world.now = 61.0
    prefilling.turn()
    assert errors(prefilling) == [DeadlineExceeded]


def test_what_turns_out_in_the_midst_of_a_turn_not_to_compile_is_in_no_step(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would ask the matcher for a mask, which there is none of."""
    core, compiled = prefilling.node.core, Future[GrammarState]()
    grammars = SimpleNamespace(matcher=lambda structured, output: GrammarMatcher(compiled, output))
    monkeypatch.setattr(core, "_matchers", Matchers(cast(Grammars, grammars)))
    move_on = core._move_on

    def fail(now: float) -> None:
        if not compiled.done():
            compiled.set_exception(ValueError("no such type"))
        move_on(now)

    monkeypatch.setattr(core, "_move_on", fail)
    constrained = StructuredOutput(StructuredKind.JSON, '{"type": "frob"}')
    send(prefilling, sampling=SamplingParams(max_tokens=5, structured_outputs=constrained))
    assert not of(Reserve, prefilling)
    assert not prefilling.node.model.is_busy
    prefilling.turn()
    assert errors(prefilling) == [InvalidRequest]
    assert core.idle


# ---- what is handed over ----


def test_the_continuation_has_what_was_said_before_and_whoever_goes_on(prefilling: Prefilling) -> None:
    ended = next_token(PROMPT, 1)  # of sample 1
    assert ended not in (next_token(PROMPT, 0), next_token(PROMPT, 2))
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=frozenset((ended,)))
    send(prefilling, prompt_tokens=PROMPT, samples=tuple(map(Sample, range(3))), sampling=sampling)
    later = AttemptId(EPOCH, "later", 1)
    send(prefilling, later, samples=(Sample(0, (60, 61)),))
    run(prefilling)
    for lease, attempt_id in ((1, WORK), (2, later)):
        hear(prefilling, Grant(attempt_id, lease, 0, len(handoff_parts(prefilling, attempt_id)), 0))
    first, second = of(Commit, prefilling)
    assert isinstance(first, Commit)
    assert isinstance(second, Commit)
    assert [sample.index for sample in first.samples] == [0, 2]
    assert second.samples[0].output_tokens[:2] == (60, 61)
    assert len(second.samples[0].output_tokens) == 3


def handoff_parts(prefilling: Prefilling, attempt_id: AttemptId) -> list[object]:
    """The parts that a decode node without any of its blocks would expect."""
    outgoing = prefilling.node.core._outgoing
    _, parts = outgoing._parts.plan(outgoing._sendings[attempt_id], Grant(attempt_id, 1, 0, 0, 0))
    return list(parts)


@pytest.fixture
def reserved(prefilling: Prefilling) -> Prefilling:
    """PROMPT computed up to its last step, and room asked for: NUM_PARTS parts."""
    send(prefilling, prompt_tokens=PROMPT)
    assert len(handoff_parts(prefilling, WORK)) == NUM_PARTS
    return prefilling


def test_parts_leave_for_credits_alone_and_old_ones_take_none_back(reserved: Prefilling) -> None:
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, 1))
    run(reserved)
    assert reserved.num_sent == 1
    hear(reserved, Credit(1, 3), Credit(1, 2), Grant(WORK, 1, 0, NUM_PARTS, 1))
    assert reserved.num_sent == 3


def test_a_dead_lease_is_drained_until_no_credit_can_follow(reserved: Prefilling) -> None:
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, 2))
    reserved.node.core.handle(Abort(WORK), 2.0)
    reserved.turn()
    assert of(Release, reserved) == [Release(WORK)]
    assert reserved.num_sent == 2
    run(reserved)
    assert not reserved.node.core.idle, "more credits may be under way"
    hear(reserved, Credit(1, 3))
    assert reserved.num_sent == 3
    hear(reserved, Refuse(WORK, RequestCancelled("over")))
    assert reserved.node.core.idle
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, 2))  # a repeat
    assert reserved.node.core.idle
    assert len(of(Release, reserved)) == 1


def test_a_grant_that_comes_too_late_is_released_and_drained(reserved: Prefilling) -> None:
    reserved.node.core.handle(Abort(WORK), 2.0)
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, 2))
    assert of(Release, reserved) == [Release(WORK), Release(WORK)]
    assert reserved.num_sent == 2
    assert not reserved.node.core.idle


def test_the_last_word_waits_for_the_decode_nodes_answer(reserved: Prefilling) -> None:
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, NUM_PARTS))
    run(reserved)
    for part in range(NUM_PARTS):
        reserved.receive(part)
        reserved.turn()
    assert not reserved.handed_off
    hear(reserved, CommitReply(1, WORK, None))
    assert len(reserved.handed_off) == 1


def test_checksums_travel_if_the_decode_node_wants_them(reserved: Prefilling) -> None:
    hear(reserved, Grant(WORK, 1, 0, NUM_PARTS, NUM_PARTS, checksums=True))
    run(reserved)
    decode = reserved.decode
    decode.transport.connect(reserved.node.incarnation, reserved.node.transport.info())
    slot = decode.staging.take(SlotOwner(reserved.node.incarnation, 1, 0))
    assert slot is not None
    decode.staging.lend(slot)
    decode.transport.expect(reserved.node.incarnation, tag_of(1, 0), slot, decode.staging.slot_bytes)
    (transfer,) = reserved.hub.pending
    assert PartHeader.parse(transfer.push.header).checked


def test_a_last_chunk_of_a_whole_step_goes_by_groups_of_layers_too(prefilling: Prefilling) -> None:
    send(prefilling, prompt_tokens=tuple(range(2, 22)))  # two steps of 10
    (reserve,) = of(Reserve, prefilling)
    assert isinstance(reserve, Reserve)
    assert (reserve.grouped_from_block, reserve.layer_groups) == (2, NUM_LAYERS)


# ---- a decode node that is lost ----


def test_a_decode_node_without_a_transport_gets_nothing_until_its_stream_was_closed(reserved: Prefilling) -> None:
    reserved.decode.transport.connect(reserved.node.incarnation, reserved.node.transport.info())
    reserved.decode.kill()
    reserved.turn()
    assert errors(reserved) == [PeerLost]
    send(reserved, AttemptId(EPOCH, "next", 0))
    assert errors(reserved) == [PeerLost, PeerLost]
    assert len(of(Reserve, reserved)) == 1
    send(reserved, AttemptId(EPOCH, "one token", 0), sampling=SamplingParams(max_tokens=1))
    run(reserved)
    assert errors(reserved) == [PeerLost, PeerLost, None], "which needs no decode node"
    reserved.node.core.handle(PeerClosed(reserved.peer, "died"), 3.0)
    run(reserved)
    send(reserved, AttemptId(EPOCH, "after", 0))
    assert len(of(Reserve, reserved)) == 2
