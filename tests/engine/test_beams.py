"""Beam search over forked blocks, against a plain one; the model asserts that each beam's blocks hold its own KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.messages import AttemptId, TokenLogprobs
from baton.sampling import FinishReason, SamplingParams
from engine.beams import BeamGroup
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence, SequenceState
from tests.engine.beam_reference import Found, beam_search
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel, expected_output, most_likely

BLOCK_SIZE = 4


def make(
    num_blocks: int,
    max_num_seqs: int = 16,
    ahead: bool = False,
    budget: int = 64,
    windows: tuple[int | None, ...] = (None, None),
) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=40,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        async_scheduling=ahead,
        windows=tuple(dict.fromkeys(windows)),
    )
    model = FakeModel(num_blocks, BLOCK_SIZE, windows=windows)
    engine = Engine(config, model)
    model.blocks = engine.blocks
    return engine


def search(
    engine: Engine, name: str, length: int, width: int, max_tokens: int, priority: int = 0, **fields: object
) -> BeamGroup[Sequence]:
    prompt = tuple(range(2, 2 + length))
    params = {"temperature": 0.0, "beam_width": width, "max_tokens": max_tokens, **fields}
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    group = BeamGroup(AttemptId(1, name, 0), length, sampling, engine.config.eos_token_ids)
    seq = Sequence(group.attempt_id, [0], prompt, BeamGroup.sampling_of(sampling), beams=group, priority=priority)
    engine.add(seq)
    engine.beam_search.begin(seq)
    return group


def run(engine: Engine, limit: int = 2000) -> list[BeamGroup[Sequence]]:
    """What is found until nothing is left to do."""
    found: list[BeamGroup[Sequence]] = []
    again = True
    for _ in range(limit):
        if not (again or engine.has_work):
            return found
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
        assert engine.num_running <= engine.config.max_num_seqs
        found += result.searched
        again = result.again
    raise AssertionError(f"it does not come to an end: {engine.num_running} run, {engine.num_waiting} wait")


def expected(length: int, width: int, max_tokens: int, ignore_eos: bool = False, penalty: float = 1.0) -> Found:
    eos = () if ignore_eos else (EOS,)
    prompt = range(2, 2 + length)
    return beam_search(lambda tokens: most_likely(tokens, 2 * width), prompt, width, max_tokens, eos, penalty)


def outputs(group: BeamGroup[Sequence]) -> Found:
    return [(beam.tokens, beam.cumulative_logprob) for beam in group.best]


def is_whole(engine: Engine) -> bool:
    return engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
@pytest.mark.parametrize(("width", "max_tokens"), [(1, 6), (2, 1), (4, 9), (10, 12)])
def test_it_finds_what_a_plain_search_finds(length: int, width: int, max_tokens: int, ahead: bool) -> None:
    engine = make(200, ahead=ahead)
    group = search(engine, "r", length, width, max_tokens)
    assert run(engine) == [group]
    assert outputs(group) == expected(length, width, max_tokens)
    assert all(beam.stop_token_id is None and not beam.logprobs for beam in group.best)
    assert is_whole(engine)


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 0.5, 5.0])
def test_a_length_penalty_orders_what_was_found(penalty: float) -> None:
    engine = make(200)
    group = search(engine, "r", 5, 4, 9, length_penalty=penalty)
    run(engine)
    assert outputs(group) == expected(5, 4, 9, penalty=penalty)
    reasons = {beam.tokens[-1] == EOS: beam.finish for beam in group.best}
    assert reasons.items() <= {True: FinishReason.STOP, False: FinishReason.LENGTH}.items()


def test_length_penalties_matter_to_these_tests() -> None:
    assert len({tuple(expected(5, 4, 9, penalty=penalty)) for penalty in (-2.0, 0.5, 5.0)}) > 1


def test_eos_is_ignored_and_stop_tokens_end_beams() -> None:
    engine = make(200)
    ignoring = search(engine, "r", 5, 4, 9, ignore_eos=True)
    run(engine)
    assert outputs(ignoring) == expected(5, 4, 9, ignore_eos=True)
    stop = ignoring.best[0].tokens[2]
    stopping = search(engine, "s", 5, 4, 9, ignore_eos=True, stop_token_ids=frozenset({stop}), length_penalty=0.0)
    run(engine)
    stopped = [beam for beam in stopping.best if beam.tokens[-1] == stop]
    assert stopped
    assert all((beam.finish, beam.stop_token_id) == (FinishReason.STOP, stop) for beam in stopped)
    assert not any(stop in beam.tokens[:-1] for beam in stopping.best)


def test_it_ends_with_the_context() -> None:
    engine = make(200)
    group = search(engine, "r", 35, 3, 30, ignore_eos=True)
    run(engine)
    assert outputs(group) == expected(35, 3, 5, ignore_eos=True)


def test_it_ends_where_every_next_token_ends_a_beam() -> None:
    (best, _), (second, _) = most_likely(range(2, 7), 2)
    engine = make(200)
    group = search(engine, "r", 5, 1, 9, stop_token_ids=frozenset({best, second}))
    assert run(engine) == [group]
    assert [beam.tokens for beam in group.best] == [(best,)]


def test_more_logprobs_than_it_needs_change_nothing_that_it_finds() -> None:
    engine = make(200)
    group = search(engine, "r", 5, 2, 9, num_logprobs=20)
    run(engine)
    assert outputs(group) == beam_search(lambda tokens: most_likely(tokens, 20)[:4], range(2, 7), 2, 9, (EOS,), 1.0)
    assert {len(entry.top) for beam in group.best for entry in beam.logprobs} == {20}
    unlikely = most_likely(range(2, 7), 20)[5][0]
    group = search(engine, "s", 5, 2, 9, num_logprobs=20, stop_token_ids=frozenset({unlikely}), length_penalty=-2.0)
    run(engine)
    assert (unlikely,) not in [beam.tokens for beam in group.best]


@pytest.mark.parametrize("k", [0, 2])
def test_logprobs_are_those_of_its_tokens(k: int) -> None:
    engine = make(200)
    group = search(engine, "r", 5, 3, 4, num_logprobs=k)
    run(engine)
    for beam in group.best:
        assert sum(entry.logprob for entry in beam.logprobs) == pytest.approx(beam.cumulative_logprob)
        for index, entry in enumerate(beam.logprobs):
            assert entry.top == most_likely([*range(2, 7), *beam.tokens[:index]], 6)[:k]
        assert len(beam.logprobs) == len(beam.tokens)


@settings(max_examples=30, deadline=None)
@given(
    num_blocks=st.integers(25, 45),
    max_num_seqs=st.sampled_from([4, 5, 8]),
    budget=st.sampled_from([64, 5]),
    ahead=st.booleans(),
    windows=st.sampled_from([(None, None), (None, 3), (6, 6)]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    others=st.integers(0, 4),
)
def test_however_little_room_there_is(
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    ahead: bool,
    windows: tuple[int | None, ...],
    lengths: list[int],
    others: int,
) -> None:
    """Groups and other sequences compete for blocks and places, and none waits for ever."""
    engine = make(num_blocks * len(set(windows)), max_num_seqs, ahead, budget, windows)
    groups = [search(engine, f"beams {number}", length, 4, 12) for number, length in enumerate(lengths)]
    sampling = SamplingParams(max_tokens=20, seed=7)
    seqs = [
        Sequence(AttemptId(1, f"other {i}", 0), [0], (50, 60 + i), sampling, arrived_s=i - 1.0) for i in range(others)
    ]
    for seq in seqs:
        engine.add(seq)
    assert {group.attempt_id for group in run(engine)} == {group.attempt_id for group in groups}
    for group, length in zip(groups, lengths, strict=True):
        assert outputs(group) == expected(length, 4, 12)
    for seq in seqs:
        assert list(seq.output_tokens) == expected_output(seq.prompt_tokens, sampling, 0, 40)[0]
    assert is_whole(engine)


def test_a_group_that_lacks_a_place_gives_its_places_to_one_that_is_due_earlier() -> None:
    """Else both would have some places in the end, and wait for the others' for ever."""
    engine = make(200, max_num_seqs=5)
    sampling = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    for name in ("one", "two"):
        engine.add(Sequence(AttemptId(1, name, 0), [0], (50, 60), sampling, arrived_s=-1.0))
    late = search(engine, "late", 5, 4, 9)
    while not engine.num_waiting or engine.num_running < 5:
        engine.compute(engine.schedule(0.0))
    early = search(engine, "early", 6, 4, 9, priority=-1)
    assert run(engine) == [early, late]
    assert [outputs(group) for group in (early, late)] == [expected(6, 4, 9), expected(5, 4, 9)]
    assert is_whole(engine)


def test_a_group_that_lacks_blocks_gives_its_blocks_to_one_that_is_due_earlier() -> None:
    """Likewise: 27 blocks are enough for either group."""
    engine = make(28)
    sampling = SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    for number in range(2):
        engine.add(Sequence(AttemptId(1, f"{number}", 0), [0], (50 + number, 60), sampling, arrived_s=-1.0))
    late = search(engine, "late", 4, 4, 20)
    for _ in range(13):
        engine.compute(engine.schedule(0.0))
    early = search(engine, "early", 3, 4, 20, priority=-1)
    assert run(engine) == [early, late]
    assert [outputs(group) for group in (early, late)] == [expected(3, 4, 20), expected(4, 4, 20)]
    assert is_whole(engine)


def preempted_search(engine: Engine) -> tuple[BeamGroup[Sequence], list[int]]:
    """A search whose three beams are all preempted, and the blocks that they lacked; another sequence runs."""
    sampling = SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    engine.add(Sequence(AttemptId(1, "first", 0), [0], (50, 60), sampling, arrived_s=-1.0))
    group = search(engine, "r", 5, 3, 12)
    while len(group.members) < 3:
        engine.compute(engine.schedule(0.0))
    lease = engine.allocate(engine.blocks.num_unclaimed)
    assert preempted(engine) == [*group.members]
    return group, lease


def test_all_beams_of_a_group_that_run_are_preempted_together() -> None:
    engine = make(60)
    group, lease = preempted_search(engine)
    while not (running := [member for member in group.members if member.state is SequenceState.RUNNING]):
        engine.blocks.release([lease.pop()])
        engine.compute(engine.schedule(0.0))
    assert len(running) < 3, "the others are preempted already"
    lease += engine.allocate(engine.blocks.num_unclaimed)
    assert preempted(engine) == running
    engine.blocks.release(lease)
    assert run(engine) == [group]
    assert outputs(group) == expected(5, 3, 12)
    assert is_whole(engine)


def test_beams_that_wait_for_another_one_do_not_make_room_for_it() -> None:
    """Else they would be preempted and computed again in turn, until there is room for all."""
    engine = make(60, max_num_seqs=4)
    group, lease = preempted_search(engine)
    engine.blocks.release(lease)
    engine.scheduler.reserve_seqs(1)
    for _ in range(5):
        plan = engine.schedule(0.0)
        assert not plan.preempted
        engine.compute(plan)
    assert [member.state is SequenceState.RUNNING for member in group.members] == [True, True, False]
    engine.scheduler.unreserve_seqs(1)
    assert run(engine) == [group]
    assert outputs(group) == expected(5, 3, 12)


def test_beams_that_take_a_launched_step_give_way_to_nobody() -> None:
    engine = make(60, max_num_seqs=4, ahead=True)
    group, lease = preempted_search(engine)
    engine.blocks.release(lease)
    engine.scheduler.reserve_seqs(1)
    engine.compute(engine.schedule(0.0))
    assert [member.in_flight for member in group.members] == [True, True, False]
    early = search(engine, "early", 6, 1, 9, priority=-1)
    plan = engine.schedule(0.0)
    assert not plan.preempted
    engine.compute(plan)
    engine.scheduler.unreserve_seqs(1)
    assert {found.attempt_id for found in run(engine)} == {group.attempt_id, early.attempt_id}


def test_beams_of_a_group_are_neighbours_in_the_queue() -> None:
    engine = make(60)
    sampling = SamplingParams(temperature=0.0, beam_width=2)
    groups = [BeamGroup[Sequence](AttemptId(1, name, 0), 3, sampling, ()) for name in ("one", "two")]
    for group in groups * 2:
        engine.waiting.add_preempted(Sequence(group.attempt_id, [0], (2, 3, 4), sampling, beams=group))
    assert [seq.beams for seq in engine.waiting] == [groups[0]] * 2 + [groups[1]] * 2


def preempted(engine: Engine) -> list[Sequence]:
    """What the next step that preempts preempts."""
    while not (plan := engine.schedule(0.0)).preempted:
        engine.compute(plan)
    engine.compute(plan)
    return plan.preempted


def test_a_group_waits_for_a_member_whose_step_is_to_come_again() -> None:
    engine = make(200)
    group = search(engine, "r", 5, 2, 9)
    while len(group.members) < 2:
        engine.compute(engine.schedule(0.0))
    for member in group.members:
        group.record(member, TokenLogprobs(0.0, ()))
    assert not group.is_complete


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5])
@pytest.mark.parametrize("ahead", [False, True])
def test_one_that_is_ended_leaves_nothing(num_turns: int, ahead: bool) -> None:
    engine = make(200, ahead=ahead)
    group, other = search(engine, "r", 5, 4, 9), search(engine, "s", 6, 2, 9)
    for _ in range(num_turns):
        engine.compute(engine.schedule(0.0))
    engine.beam_search.end(group)
    engine.beam_search.end(group)
    assert run(engine) == [other]
    assert is_whole(engine)


@pytest.mark.parametrize(
    ("width", "num_tokens", "param"), [(10, 20, "beam_width"), (8, 40, "max_tokens"), (49, 8, "beam_width")]
)
def test_one_that_may_not_fit_is_refused(width: int, num_tokens: int, param: str) -> None:
    engine = make(40, max_num_seqs=60 if width == 49 else 8)
    with pytest.raises(InvalidRequest) as refused:
        engine.beam_search.require_possible(width, num_tokens)
    assert refused.value.param == param
    engine.beam_search.require_possible(3, 1000)  # of which the context takes 40
