"""The engine's rules, one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from engine.sequence import Sequence, SequenceState
from tests.engine.counting import SIZES, make, run, sequence, turns


@pytest.mark.parametrize(
    ("sampling", "output", "reason", "stop_token_id"),
    [
        ({"max_tokens": 3}, [10, 11, 12], FinishReason.LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": frozenset({12})}, [10, 11, 12], FinishReason.STOP, 12),
        ({"max_tokens": 3, "stop_token_ids": frozenset({12})}, [10, 11, 12], FinishReason.STOP, 12),
    ],
)
def test_how_a_sample_ends(
    sampling: dict[str, Any], output: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    engine, _ = make()
    engine.add(sequence(**sampling))
    tokens = [token for result in run(engine) for token in result.sampled]
    assert [token.token for token in tokens] == output
    assert [token.index for token in tokens] == [0, 1, 2]
    assert [token.finish for token in tokens] == [None, None, reason]
    assert tokens[-1].stop_token_id == stop_token_id
    assert tokens[-1].sequence.state is SequenceState.FINISHED


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, FinishReason.STOP), (True, FinishReason.LENGTH)])
def test_any_eos_ends_a_sample_unless_ignored(ignore_eos: bool, reason: FinishReason) -> None:
    engine, _ = make(eos_token_ids=(1, 11))
    engine.add(sequence(ignore_eos=ignore_eos))
    tokens = [token for result in run(engine) for token in result.sampled]
    assert tokens[-1].finish is reason
    assert tokens[-1].stop_token_id is None
    assert len(tokens) == (4 if ignore_eos else 2)


def test_the_context_ends_a_sample() -> None:
    engine, _ = make()
    seq = sequence(30, max_tokens=1000)
    seq.tokens.extend(range(31))
    engine.add(seq)
    tokens = [token for result in run(engine) for token in result.sampled]
    assert seq.num_tokens == 64
    assert [token.index for token in tokens] == [31, 32, 33]
    assert tokens[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("seq", "param", "numbers"),
    [
        (sequence(0), "prompt", ()),
        (sequence(64, first=0), "prompt", ("64",)),
    ],
)
def test_what_can_never_run_is_refused(seq: Sequence, param: str, numbers: tuple[str, ...]) -> None:
    engine, _ = make()
    with pytest.raises(InvalidRequest) as refused:
        engine.add(seq)
    assert refused.value.param == param
    assert all(number in refused.value.message for number in numbers)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_blocks": 16}, "--num-gpu-blocks-override"),
        ({"block_size": 0}, "--block-size"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
    ],
)
def test_bad_sizes_name_their_flag(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be") as refused:
        dataclasses.replace(SIZES, **change)
    assert "\n" not in str(refused.value)


def test_a_long_prompt_delays_nobodys_next_token() -> None:
    engine, model = make(max_num_batched_tokens=8)
    long, short = sequence(40, first=0), sequence(2, first=60, max_tokens=30)
    engine.add(short)
    engine.compute(engine.schedule(0.0))
    engine.add(long)
    results = [engine.compute(engine.schedule(0.0)) for _ in range(6)]
    assert all(short in [token.sequence for token in result.sampled] for result in results)
    assert [chunk.length for batch in model.batches[1:] for chunk in batch if chunk.sequence is long] == [8] * 5 + [1]


def test_the_budget_is_the_prompts_alone() -> None:
    engine, model = make(max_num_batched_tokens=2)
    engine.add(sequence(1, samples=3, max_tokens=20))
    engine.compute(engine.schedule(0.0))
    engine.add(sequence(4, first=60))
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert [[chunk.length for chunk in batch] for batch in model.batches] == [[1], [1, 1, 1, 2], [1, 1, 1, 2], [1] * 4]


@pytest.mark.parametrize("hand_off", [False, True])
def test_steps_that_compute_a_prompt_advance_it(hand_off: bool) -> None:
    """A prompt to hand off again has the output so far, which is computed as the prompt is."""
    engine, _ = make(max_num_batched_tokens=4)
    seq = sequence(6, hand_off=hand_off, max_tokens=9)
    if hand_off:
        seq.tokens.extend(range(10, 14))
    engine.add(seq)
    advanced = [result.advanced for result in run(engine)]
    assert advanced == ([[seq]] * 3 if hand_off else [[seq]] * 2 + [[]] * 8)


def test_the_samples_of_a_prompt_that_does_not_end_in_a_step_do_not_count() -> None:
    engine, model = make(max_num_seqs=4, max_num_batched_tokens=8)
    for first, length, samples in ((0, 3, 3), (20, 9, 2)):
        engine.add(sequence(length, first=first, samples=samples, max_tokens=1))
    run(engine)
    assert [[chunk.length for chunk in batch] for batch in model.batches] == [[3, 5], [4]]


def test_several_prompts_share_a_step_and_leave_in_order() -> None:
    engine, model = make(max_num_batched_tokens=12)
    prompts = [sequence(5, first=10 * i, max_tokens=1) for i in range(1, 5)]
    for seq in prompts:
        engine.add(seq)
    plans = [plan for plan, _ in turns(engine)]
    assert [[(c.sequence, c.length) for c in batch] for batch in model.batches] == [
        [(prompts[0], 5), (prompts[1], 5), (prompts[2], 2)],
        [(prompts[2], 3), (prompts[3], 5)],
    ]
    assert [plan.started for plan in plans] == [prompts[:3], prompts[3:]]
    assert [seq.started_s for seq in prompts] == [0.0, 0.0, 0.0, 1.0]


def test_a_saturated_step_takes_no_further_prompt_but_a_long_one_has_all_of_the_budget() -> None:
    engine, model = make(max_num_batched_tokens=32, saturating_num_tokens=8)
    for number, length in enumerate((40, 5, 6, 7)):
        engine.add(sequence(length, first=10 * number, max_tokens=1))
    run(engine)
    assert [[chunk.length for chunk in batch] for batch in model.batches] == [[32], [8], [5, 6], [7]]


@pytest.mark.parametrize("hand_off", [False, True])
def test_the_samples_of_prompts_in_a_step_are_no_more_than_may_run_but_for_those_of_one(hand_off: bool) -> None:
    """Memory for what a sampler copies of logits was measured with as many choices as sequences may run."""
    engine, model = make(max_num_seqs=4, max_num_batched_tokens=9)
    numbers = (6, 3, 2, 1, 1)
    prompts = [sequence(3, first=10 * i, samples=n, max_tokens=1, hand_off=hand_off) for i, n in enumerate(numbers)]
    for seq in prompts:
        engine.add(seq)
    run(engine)
    steps = [[len(chunk.sequence.samples) for chunk in batch if chunk.samples_token] for batch in model.batches]
    assert steps == [[6], [3], [2, 1, 1]]


def test_the_samples_of_a_prompt_count_also_if_only_its_last_token_is_left() -> None:
    engine, model = make(max_num_seqs=4, max_num_batched_tokens=8)
    for first, length in ((0, 9), (20, 3)):
        engine.add(sequence(length, first=first, samples=4, max_tokens=1))
    run(engine)
    assert [[chunk.length for chunk in batch] for batch in model.batches] == [[8], [1], [3]]


def test_the_samples_of_a_prompt_count_also_if_the_prefix_cache_has_most_of_it() -> None:
    engine, _ = make(max_num_seqs=4, max_num_batched_tokens=15)
    engine.add(sequence(13, max_tokens=1))
    run(engine)
    first, cached = sequence(3, first=0, samples=3, max_tokens=1), sequence(13, samples=2, max_tokens=1)
    for seq in (first, cached):
        engine.add(seq)
    assert [plan.started for plan, _ in turns(engine)] == [[first], [cached]]


def test_a_full_prefix_hit_computes_its_last_block_anew() -> None:
    engine, model = make()
    first = sequence(8)
    engine.add(first)
    run(engine)
    again = sequence(8)
    engine.add(again)
    engine.compute(engine.schedule(0.0))
    assert again.num_cached_tokens == 4
    assert model.batches[-1][0].start == 4


def test_generated_blocks_are_hits_for_the_next_turn_and_salts_part_caches() -> None:
    engine, _ = make()
    engine.add(sequence(6, max_tokens=8))
    run(engine)
    turn = tuple(range(50, 56)) + tuple(range(10, 18))
    for salt, cached in (("", 12), ("other", 0)):
        seq = Sequence(AttemptId(1, f"turn{salt}", 0), [0], turn, SamplingParams(), cache_salt=salt)
        engine.add(seq)
        engine.compute(engine.schedule(0.0))
        assert seq.num_cached_tokens == cached
        engine.sequences.release(seq)


def test_reserved_places_are_not_given_to_waiting_sequences() -> None:
    engine, _ = make(max_num_seqs=2)
    engine.scheduler.reserve_seqs(1)
    seqs = [sequence(3), sequence(3, first=60)]
    for seq in seqs:
        engine.add(seq)
    engine.compute(engine.schedule(0.0))
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.scheduler.unreserve_seqs(1)
    with pytest.raises(AssertionError, match="1 places given back of 0"):
        engine.scheduler.unreserve_seqs(1)
    engine.compute(engine.schedule(0.0))
    assert engine.num_running == 2


def test_nothing_is_begun_in_a_step_that_preempts() -> None:
    """The blocks that are free then are for sequences that run."""
    engine, _ = make(num_blocks=17)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    between = sequence(2, first=90, arrived_s=young.arrived_s - 0.5)
    engine.add(old)
    engine.add(young)
    engine.compute(engine.schedule(0.0))
    engine.add(between)
    while not (plan := engine.schedule(0.0)).preempted:
        assert not plan.started, "all blocks are in use"
        engine.compute(plan)
    assert plan.preempted == [young]
    assert not plan.started
    engine.compute(plan)
    assert engine.schedule(0.0).started == [between]


def test_the_youngest_is_preempted_and_comes_back_before_newcomers() -> None:
    engine, _ = make(num_blocks=17)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    while not engine.waiting.has_preempted(float("inf")):
        plan = engine.schedule(0.0)
        engine.compute(plan)
        engine.check_integrity()
    assert plan.preempted == [young]
    assert not young.block_table
    num_outputs = young.num_output_tokens
    newcomer = sequence(2, first=90)
    engine.add(newcomer)
    done = turns(engine)
    assert young.num_output_tokens == 30 > num_outputs
    assert engine.num_preemptions == young.num_preemptions > 0
    order = [token.sequence for _, result in done for token in result.sampled]
    assert order.index(young) < order.index(newcomer)
    assert young not in [seq for plan, _ in done for seq in plan.started]


def test_a_prompt_to_hand_off_keeps_its_blocks_however_young_it_is() -> None:
    """They are promised to a transfer."""
    engine, _ = make(num_blocks=17, max_num_batched_tokens=4)
    old, promised = sequence(4, first=0, max_tokens=30), sequence(30, first=40, hand_off=True)
    for seq in (old, promised):
        engine.add(seq)
        engine.compute(engine.schedule(0.0))
    assert [seq.state for seq in (old, promised)] == [SequenceState.RUNNING] * 2
    engine.blocks.allocate(engine.blocks.num_free)
    table = list(promised.block_table)
    while not engine.waiting.has_preempted(float("inf")):
        plan = engine.schedule(0.0)
        engine.compute(plan)
    assert plan.preempted == [old]
    assert promised.block_table[: len(table)] == table


def test_alone_without_blocks_a_sequence_waits_for_leases() -> None:
    engine, _ = make(num_blocks=17)
    lease = engine.allocate(14)
    seq = sequence(7, max_tokens=9)
    engine.add(seq)
    results = [engine.compute(engine.schedule(0.0)) for _ in range(6)]
    assert [result.num_tokens for result in results] == [7, 1, 0, 0, 0, 0]
    assert engine.waiting.has_preempted(float("inf"))
    engine.blocks.release(lease)
    run(engine)
    assert seq.output_tokens == tuple(range(10, 19))


def test_a_turn_that_only_preempts_is_followed_by_one_that_admits() -> None:
    """No event need come for that: what keeps the blocks that are missing may stay for long."""
    engine, _ = make(num_blocks=17)
    young, urgent = sequence(20, first=0, max_tokens=40), sequence(9, max_tokens=2, priority=-1)
    engine.add(young)
    engine.compute(engine.schedule(0.0))
    lease = engine.allocate(engine.blocks.num_free)
    engine.add(urgent)
    while not young.num_preemptions:
        result = engine.compute(engine.schedule(0.0))
    assert result.again
    assert [chunk.sequence for chunk in engine.schedule(0.0).chunks] == [urgent]
    engine.blocks.release(lease)
