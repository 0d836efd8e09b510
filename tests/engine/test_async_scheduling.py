"""A step is launched before the one before it has ended: who may run ahead, and what waits for a step's end."""

from __future__ import annotations

import pytest

from engine.sequence import SequenceState
from engine.step import StepResult
from tests.engine.counting import make, run, sequence


def test_a_step_is_launched_before_the_one_before_it_retires() -> None:
    engine, model = make(async_scheduling=True)
    seq = sequence(5, max_tokens=3)
    engine.add(seq)
    results = run(engine)
    assert [[token.token for token in result.sampled] for result in results] == [[], [10], [11], [12]]
    assert [(c.start, c.length) for batch in model.batches for c in batch] == [(0, 5), (5, 1), (6, 1)]
    assert not results[-1].again
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_who_runs_ahead_does_so_from_the_last_chunk_of_its_prompt_on() -> None:
    engine, model = make(async_scheduling=True, max_num_batched_tokens=4)
    engine.add(sequence(5, max_tokens=3))
    results = run(engine)
    assert [[token.token for token in result.sampled] for result in results] == [[], [], [10], [11], [12]]
    assert [(c.start, c.length) for batch in model.batches for c in batch] == [(0, 4), (4, 1), (5, 1), (6, 1)]


def test_a_token_that_ends_a_sample_makes_its_launched_step_vain() -> None:
    engine, model = make(async_scheduling=True)
    seq = sequence(5, max_tokens=9, stop_token_ids=frozenset({11}))
    engine.add(seq)
    for _ in range(3):
        result = engine.compute(engine.schedule(0.0))
    assert [token.token for token in result.sampled] == [11]
    assert [(c.start, c.length) for batch in model.batches for c in batch] == [(0, 5), (5, 1), (6, 1)]
    assert seq.state is SequenceState.FINISHED
    assert engine.blocks.num_free + engine.blocks.num_cached < engine.blocks.num_total, "a launched step names them"
    engine.check_integrity()
    result = engine.compute(engine.schedule(0.0))
    assert not result.sampled
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total
    engine.check_integrity()


def test_an_abort_under_a_launched_step_gives_blocks_back_when_it_retires() -> None:
    engine, _ = make(async_scheduling=True)
    stays, goes = sequence(5, first=0, max_tokens=9), sequence(9, first=60, max_tokens=9)
    for seq in (stays, goes):
        engine.add(seq)
    engine.compute(engine.schedule(0.0))
    num_free = engine.blocks.num_free
    engine.sequences.release(goes)
    engine.sequences.release(goes)
    assert engine.blocks.num_free == num_free
    engine.check_integrity()
    results = run(engine)
    assert {token.sequence for result in results for token in result.sampled} == {stays}
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_nobody_is_preempted_under_a_launched_step() -> None:
    engine, model = make(num_blocks=17, async_scheduling=True)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    num_quiet = 0
    while not engine.waiting.has_preempted(float("inf")):
        num_launched = len(model.batches)
        plan = engine.schedule(0.0)
        result = engine.compute(plan)
        engine.check_integrity()
        if len(model.batches) == num_launched:
            num_quiet += 1
            assert result.num_tokens, "the turn without a launch lets the last step retire"
            assert result.again
    assert num_quiet == 1
    assert plan.preempted == [young]
    assert young in model.forgotten
    run(engine)
    for seq in (old, young):
        assert seq.output_tokens == tuple(range(10, 40))


def test_nobody_is_preempted_under_a_launched_step_for_the_blocks_of_all_groups() -> None:
    engine, _ = make(num_blocks=34, async_scheduling=True, windows=(None, 60))
    old, young = sequence(30, first=0, max_tokens=30), sequence(29, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    while len(old.tokens) + old.num_pending_tokens <= 32:
        engine.compute(engine.schedule(0.0))
    assert old.in_flight
    assert engine.blocks.num_free == 1, "one of the two that it needs"
    plan = engine.schedule(0.0)
    assert not plan.preempted
    assert not plan.chunks
    engine.compute(plan)
    engine.check_integrity()
    assert engine.schedule(0.0).preempted == [young]


def test_a_token_that_will_be_the_last_gets_no_block() -> None:
    engine, _ = make(async_scheduling=True)
    seq = sequence(5, max_tokens=4)
    engine.add(seq)
    num_blocks = set[int]()
    while seq.state is not SequenceState.FINISHED:
        plan = engine.schedule(0.0)
        num_blocks.add(len(seq.block_table))
        engine.compute(plan)
    assert num_blocks == {2}


def test_forks_and_handoffs_wait_for_their_first_token() -> None:
    engine, model = make(async_scheduling=True)
    forks, parks = sequence(5, first=0, samples=2, max_tokens=3), sequence(5, first=60, hand_off=True)
    for seq in (forks, parks):
        engine.add(seq)
    results = run(engine)
    assert [len(batch) for batch in model.batches] == [2, 2, 2]
    assert [len(result.sampled) for result in results] == [0, 3, 0, 2, 2][: len(results)]
    assert parks.state is SequenceState.PARKED


@pytest.mark.parametrize("ahead", [False, True])
def test_without_waiting_a_step_retires_once_it_is_done(ahead: bool) -> None:
    engine, model = make(async_scheduling=ahead)
    model.slow = True
    seq = sequence(5, max_tokens=3)
    engine.add(seq)

    def turn() -> StepResult:
        result = engine.compute(engine.schedule(0.0), wait=False)
        engine.check_integrity()
        return result

    assert turn().again is ahead  # one more may be launched
    began = engine.device_busy_since
    assert began is not None
    assert not turn().again
    assert len(model.batches) == (2 if ahead else 1)
    assert not engine.has_room
    assert not engine.schedule(0.0).chunks
    for _ in range(3):
        assert turn().sampled == []
    assert engine.device_busy_since == began
    model.steps[0].running = False
    result = turn()
    assert [token.token for token in result.sampled] == [10]
    assert result.again
    for launched in model.steps:
        launched.running = False
    model.slow = False
    while turn().again:
        pass
    assert seq.state is SequenceState.FINISHED
    assert engine.device_busy_since is None


def test_layers_of_an_earlier_step_are_not_those_of_a_prompts_last() -> None:
    engine, model = make(async_scheduling=True, max_num_batched_tokens=8)
    model.slow = True
    seq = sequence(12, hand_off=True)
    engine.add(seq)
    engine.compute(engine.schedule(0.0), wait=False)
    assert engine.layers_computed() == {}, "its last tokens come with the next step"
    engine.compute(engine.schedule(0.0), wait=False)
    assert len(model.batches) == 2
    assert engine.layers_computed() == {seq: 1}
