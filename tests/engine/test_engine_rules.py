"""The engine's rules, one at a time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from baton.block_hash import next_hash
from baton.errors import InvalidRequest
from baton.messages import WorkId
from baton.sampling import FinishReason, SamplingParams
from engine.config import EngineConfig
from engine.engine import Choice, Chunk, Engine, StepResult
from engine.sequence import Sequence, SequenceState

SIZES = EngineConfig(num_blocks=33, max_model_len=64, vocab_size=100, eos_token_ids=(1, 2), block_size=4)
_ids = itertools.count()


@dataclasses.dataclass
class Launched:
    choices: list[list[Choice]]

    running: bool = False

    def is_done(self) -> bool:
        return not self.running

    def num_layers_done(self) -> int:
        return 1

    def wait(self) -> list[list[Choice]]:
        return self.choices


class Counting:
    """A model that says 10, 11, 12, ... as the outputs of every sample, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Chunk]] = []
        self.copies: list[tuple[int, int]] = []
        self.forgotten: list[Sequence] = []
        self.steps: list[Launched] = []
        self.slow = False  # what is launched now is done when `running` says so

    def launch(self, chunks: list[Chunk]) -> Launched:
        self.batches.append(chunks)
        choices = [Choice(10 + chunk.end - len(chunk.sequence.prompt_tokens)) for chunk in chunks]
        step = Launched(
            [[choice] * len(c.sequence.samples) * c.samples_token for c, choice in zip(chunks, choices, strict=True)],
            running=self.slow,
        )
        self.steps.append(step)
        return step

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.copies += pairs


def make(**sizes: int) -> tuple[Engine, Counting]:
    model = Counting()
    return Engine(dataclasses.replace(SIZES, **sizes), model), model


def sequence(num_tokens: int = 5, *, samples: int = 1, first: int = 50, **kwargs: object) -> Sequence:
    params = {name: kwargs.pop(name) for name in list(kwargs) if name in SamplingParams.__dataclass_fields__}
    prompt = tuple(range(first, first + num_tokens))
    sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    number = next(_ids)
    kwargs.setdefault("arrived_s", float(number))
    return Sequence(WorkId(1, str(number), 0), list(range(samples)), prompt, sampling, **kwargs)  # type: ignore[arg-type]


def run(engine: Engine, limit: int = 200) -> list[StepResult]:
    results = []
    again = True
    while (again or engine.has_work) and len(results) < limit:
        again = False
        results.append(engine.compute(engine.schedule(float(len(results)))))
        again = results[-1].again
        engine.check_integrity()
    return results


@pytest.mark.parametrize(
    ("sampling", "output", "reason", "stop_token_id"),
    [
        ({"max_tokens": 3}, [10, 11, 12], FinishReason.LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": (12,)}, [10, 11, 12], FinishReason.STOP, 12),
        ({"max_tokens": 3, "stop_token_ids": (12,)}, [10, 11, 12], FinishReason.STOP, 12),
    ],
)
def test_how_a_sample_ends(
    sampling: dict[str, object], output: list[int], reason: FinishReason, stop_token_id: int | None
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
    engine, _ = make()
    engine.config = dataclasses.replace(SIZES, eos_token_ids=(1, 11))
    engine.add(sequence(ignore_eos=ignore_eos))
    tokens = [token for result in run(engine) for token in result.sampled]
    assert tokens[-1].finish is reason
    assert tokens[-1].stop_token_id is None
    assert len(tokens) == (4 if ignore_eos else 2)


def test_the_context_ends_a_sample() -> None:
    engine, _ = make()
    seq = sequence(30, max_tokens=1000)
    seq.tokens += range(31)
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
        (sequence(2, first=99), "prompt", ("100",)),
        (sequence(2, first=-1), "prompt", ("100",)),
        (sequence(logit_bias={100: 1.0}), "logit_bias", ("100",)),
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
def test_bad_sizes_name_their_flag(change: dict[str, int], flag: str) -> None:
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


def test_several_prompts_share_a_step_and_leave_in_order() -> None:
    engine, model = make(max_num_batched_tokens=12)
    prompts = [sequence(5, first=10 * i, max_tokens=1) for i in range(1, 5)]
    for seq in prompts:
        engine.add(seq)
    results = run(engine)
    assert [[(c.sequence, c.length) for c in batch] for batch in model.batches] == [
        [(prompts[0], 5), (prompts[1], 5), (prompts[2], 2)],
        [(prompts[2], 3), (prompts[3], 5)],
    ]
    assert [result.started for result in results] == [prompts[:3], prompts[3:]]
    assert [seq.started_s for seq in prompts] == [0.0, 0.0, 0.0, 1.0]


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
        seq = Sequence(WorkId(1, f"turn{salt}", 0), [0], turn, SamplingParams(), cache_salt=salt)
        engine.add(seq)
        engine.compute(engine.schedule(0.0))
        assert seq.num_cached_tokens == cached
        engine.release(seq)


def test_a_prompt_to_hand_off_is_parked_with_its_tokens_until_released() -> None:
    engine, _ = make(max_num_batched_tokens=4)
    seq = sequence(6, samples=3, hand_off=True, max_tokens=1)
    engine.add(seq)
    first, second = engine.compute(engine.schedule(0.0)), engine.compute(engine.schedule(1.0))
    assert (first.advanced, first.parked, first.sampled) == ([seq], [], [])
    assert (second.advanced, second.parked) == ([seq], [seq])
    assert [(t.sequence, t.sample, t.index) for t in second.sampled] == [(seq, 0, 0), (seq, 1, 0), (seq, 2, 0)]
    assert seq.tokens == list(seq.prompt_tokens)
    assert not engine.has_work
    engine.check_integrity()
    engine.release(seq)
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_samples_fork_sharing_full_blocks_and_copying_the_partial_one() -> None:
    engine, model = make()
    parent = sequence(6, samples=3, max_tokens=9)
    engine.add(parent)
    forks = [token.sequence for token in engine.compute(engine.schedule(0.0)).sampled]
    engine.check_integrity()
    assert parent.state is SequenceState.FINISHED
    assert [fork.samples for fork in forks] == [[0], [1], [2]]
    assert len({fork.block_table[0] for fork in forks}) == 1
    last = [fork.block_table[1] for fork in forks]
    assert model.copies == [(last[0], last[1]), (last[0], last[2])]
    run(engine)


def test_forks_at_a_block_boundary_copy_nothing() -> None:
    engine, model = make()
    engine.add(sequence(8, samples=2))
    run(engine)
    assert not model.copies


def test_forks_without_a_place_wait_and_lose_nothing() -> None:
    engine, _ = make(max_num_seqs=2)
    engine.add(sequence(6, samples=5))
    tokens = [token for result in run(engine) for token in result.sampled]
    for sample in range(5):
        assert [token.token for token in tokens if token.sample == sample] == [10, 11, 12, 13]


def test_reserved_places_are_not_given_to_waiting_sequences() -> None:
    engine, _ = make(max_num_seqs=2)
    engine.num_reserved_seqs = 1
    seqs = [sequence(3), sequence(3, first=60)]
    for seq in seqs:
        engine.add(seq)
    engine.compute(engine.schedule(0.0))
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.num_reserved_seqs = 0
    engine.compute(engine.schedule(0.0))
    assert engine.num_running == 2


def test_the_youngest_is_preempted_and_comes_back_before_newcomers() -> None:
    engine, _ = make(num_blocks=17)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    while not engine.has_preempted:
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
    assert result.preempted == [young]
    assert not young.block_table
    num_outputs = young.num_output_tokens
    newcomer = sequence(2, first=90)
    engine.add(newcomer)
    results = run(engine)
    assert young.num_output_tokens == 30 > num_outputs
    assert engine.num_preemptions == young.num_preemptions > 0
    order = [token.sequence for result in results for token in result.sampled]
    assert order.index(young) < order.index(newcomer)
    assert young not in [seq for result in results for seq in result.started]


def test_alone_without_blocks_a_sequence_waits_for_leases() -> None:
    engine, _ = make(num_blocks=17)
    lease = engine.blocks.allocate(14)
    seq = sequence(7, max_tokens=9)
    engine.add(seq)
    results = [engine.compute(engine.schedule(0.0)) for _ in range(6)]
    assert [result.num_tokens for result in results] == [7, 1, 0, 0, 0, 0]
    assert engine.has_preempted
    engine.blocks.release(lease)
    run(engine)
    assert seq.output_tokens == tuple(range(10, 19))


def test_adoption_loses_no_step_and_names_the_prompts_blocks() -> None:
    engine, model = make()
    seq = sequence(9, max_tokens=4)
    seq.block_table = engine.blocks.allocate(9 // 4 + 2)
    spare = seq.block_table.pop()
    forks = engine.adopt(seq, {0: (10,), 3: (11,)}, [spare])
    engine.check_integrity()
    assert model.copies == [(forks[0].block_table[2], spare)]
    assert len(engine.blocks.match(forks[1].block_hashes(2, 4))) == 2
    result = engine.compute(engine.schedule(0.0))
    assert [(c.start, c.length) for c in model.batches[0]] == [(9, 1), (9, 1)]
    assert [(t.sample, t.index) for t in result.sampled] == [(0, 1), (3, 1)]
    assert not result.started
    assert not result.advanced


def test_adopted_blocks_keep_the_names_that_came_with_them() -> None:
    engine, _ = make()
    seq = sequence(9, max_tokens=8)
    seq.block_table, names = engine.blocks.allocate(3), [b"a" * 32, b"b" * 32]
    seq.take_names(names)
    (running,) = engine.adopt(seq, {0: (10,)}, [])
    table = running.block_table
    assert [engine.blocks.hash_of(block) for block in table[:2]] == names
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert engine.blocks.hash_of(table[2]) == next_hash(names[-1], running.tokens[8:12])


# ---- one step ahead ----


def test_a_step_is_launched_before_the_one_before_it_retires() -> None:
    engine, model = make(async_scheduling=True)
    seq = sequence(5, max_tokens=3)
    engine.add(seq)
    results = run(engine)
    assert [[token.token for token in result.sampled] for result in results] == [[], [10], [11], [12]]
    assert [(c.start, c.length) for batch in model.batches for c in batch] == [(0, 5), (5, 1), (6, 1)]
    assert not results[-1].again
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_a_token_that_ends_a_sample_makes_its_launched_step_vain() -> None:
    engine, model = make(async_scheduling=True)
    seq = sequence(5, max_tokens=9, stop_token_ids=(11,))
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
    engine.release(goes)
    engine.release(goes)
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
    while not engine.has_preempted:
        num_launched = len(model.batches)
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
        if len(model.batches) == num_launched:
            num_quiet += 1
            assert result.num_tokens, "the turn without a launch lets the last step retire"
            assert result.again
    assert num_quiet == 1
    assert result.preempted == [young]
    assert young in model.forgotten
    run(engine)
    for seq in (old, young):
        assert seq.output_tokens == tuple(range(10, 40))


def test_forks_and_handoffs_wait_for_their_first_token() -> None:
    engine, model = make(async_scheduling=True)
    forks, parks = sequence(5, first=0, samples=2, max_tokens=3), sequence(5, first=60, hand_off=True)
    for seq in (forks, parks):
        engine.add(seq)
    results = run(engine)
    assert [len(batch) for batch in model.batches] == [2, 2, 2]
    assert [len(result.sampled) for result in results] == [0, 3, 0, 2, 2][: len(results)]
    assert parks.state is SequenceState.PARKED


def test_a_saturated_step_takes_no_further_prompt_but_a_long_one_has_all_of_the_budget() -> None:
    engine, model = make(max_num_batched_tokens=32, saturating_num_tokens=8)
    for number, length in enumerate((40, 5, 6, 7)):
        engine.add(sequence(length, first=10 * number, max_tokens=1))
    run(engine)
    assert [[chunk.length for chunk in batch] for batch in model.batches] == [[32], [8], [5, 6], [7]]


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
