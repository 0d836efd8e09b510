"""A step may give a sequence no token, or several: what is said is the same as with one token in each step."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.block_hash import next_hash, root_hash
from baton.messages import AttemptId, TokenLogprobs
from baton.sampling import FinishReason, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.runner import TorchModelRunner, accepted
from engine.sequence import Sequence, SequenceState
from engine.step import Begun, Choice, Chunk, SampledToken
from tests.engine import counting, tiny_models
from tests.engine.counting import Counting, Launched, sequence

torch.set_num_threads(1)

NUM_DRAFTS = 2


class Guessed(Counting):
    """Counts as `Counting` does, and takes draft tokens that count on. In its steps numbered `empty` it chooses none.
    Each token's logprob is minus the token."""

    def __init__(self, empty: Seq[int] = ()) -> None:
        super().__init__()
        self._empty = empty

    def launch(self, chunks: Iterable[Chunk], begun: Begun = lambda waited_s: None) -> Launched:
        chunks = list(chunks)
        step = super().launch(chunks, begun)
        step.choices = [self._choices(chunk) for chunk in chunks]
        if len(self.batches) - 1 in self._empty:
            step.choices = [[] for _ in chunks]
        return step

    @staticmethod
    def _choices(chunk: Chunk) -> list[Choice]:
        last = 10 + chunk.end - len(chunk.sequence.prompt_tokens)
        tokens = range(last - chunk.num_logits + 1, last + 1)
        choices = [Choice(token, TokenLogprobs(-float(token), ())) for token in tokens]
        return accepted(choices, chunk.draft_tokens) * len(chunk.sequence.samples)


def make(model: Counting, ahead: bool = False, **sizes: Any) -> Engine:
    config: dict[str, Any] = {"num_blocks": 33, "max_model_len": 64, "block_size": 4, **sizes}
    return Engine(
        EngineConfig(
            vocab_size=100, eos_token_ids=(1, 2), num_speculative_tokens=NUM_DRAFTS, async_scheduling=ahead, **config
        ),
        model,
    )


def run(engine: Engine, seq: Sequence, guesses: Seq[Seq[int]] = ()) -> list[list[SampledToken]]:
    """What each step gave the sequence, which is proposed one of the guesses before each of its steps."""
    given, left = [], list(guesses)
    while seq.state is not SequenceState.FINISHED and len(given) < 100:
        if left and seq.takes_drafts:
            engine.propose(seq, left.pop(0))
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
        if result.num_tokens:
            given.append([token for token in result.sampled if token.sequence is seq])
    return given


def tokens(given: list[list[SampledToken]]) -> list[list[int]]:
    return [[sampled.token for sampled in step] for step in given]


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_that_are_right_come_together_and_wrong_ones_cost_nothing(ahead: bool) -> None:
    engine = make(Guessed(), ahead)
    seq = sequence(5, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    given = run(engine, seq, [(11, 12), (99, 99), (15, 99), (), (18, 19, 20)])
    assert tokens(given) == [[10], [11, 12, 13], [14], [15, 16], [17], [18]], "the last guess goes beyond max_tokens"
    every = [sampled for step in given for sampled in step]
    assert [sampled.index for sampled in every] == list(range(9))
    assert [sampled.logprobs for sampled in every] == [TokenLogprobs(-float(t), ()) for t in range(10, 19)]
    assert [sampled.finish for sampled in every] == [None] * 8 + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("sampling", "said", "reason"),
    [
        ({"max_tokens": 3}, [10, 11, 12], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": frozenset({12})}, [10, 11, 12], FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": frozenset({11, 12})}, [10, 11], FinishReason.STOP),
    ],
)
def test_what_follows_the_end_is_cut_off_and_its_kv_is_nobodys(
    sampling: dict[str, Any], said: list[int], reason: FinishReason
) -> None:
    model = Guessed()
    engine = make(model, block_size=1, num_blocks=129)
    seq = sequence(5, runs_ahead=False, **sampling)
    engine.add(seq)
    every = [sampled for step in run(engine, seq, [(11, 12)]) for sampled in step]
    assert [sampled.token for sampled in every] == said
    assert [sampled.finish for sampled in every] == [None] * (len(said) - 1) + [reason]
    assert seq.output_tokens == tuple(said)
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert engine.blocks.num_cached == seq.num_tokens - 1, "KV of a token that was cut off has a name"
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


@pytest.mark.parametrize("guesses", [(), [(11, 12), (14, 99), (16, 17)]], ids=["one-by-one", "guessed"])
def test_blocks_are_named_by_the_tokens_that_came_together(guesses: Seq[Seq[int]]) -> None:
    engine = make(Guessed())
    seq = sequence(6, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    run(engine, seq, guesses)
    names, whole = [root_hash("")], [*range(50, 56), *range(10, 19)]
    for first in range(0, 12, 4):
        names.append(next_hash(names[-1], whole[first : first + 4]))
    assert len(engine.blocks.match(names[1:])) == 3
    turn = Sequence(AttemptId(1, "turn", 0), [0], tuple(whole), SamplingParams())
    engine.add(turn)
    engine.compute(engine.schedule(0.0))
    assert turn.num_cached_tokens == 12


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (1, 2), (0, 2, 3)])
def test_a_step_that_chooses_nothing_is_made_up_for(empty: tuple[int, ...], runs_ahead: bool, ahead: bool) -> None:
    """Also where the next step was launched behind the token that did not come."""
    model = Guessed(empty)
    engine = make(model, ahead)
    seq = sequence(7, max_tokens=4, runs_ahead=runs_ahead)
    engine.add(seq)
    given = run(engine, seq)
    assert [token for step in tokens(given) for token in step] == [10, 11, 12, 13]
    computed = [(batch[0].start, batch[0].end) for batch in model.batches]
    assert {position for start, end in computed for position in range(start, end)} == set(range(10))
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fields", [{"samples": 2}, {"hand_off": True}])
def test_a_prompt_for_which_a_step_chooses_nothing_has_another_one(fields: dict[str, Any], ahead: bool) -> None:
    model = Guessed(empty=(0,))
    engine = make(model, ahead)
    engine.add(sequence(7, max_tokens=1, **fields))
    sampled = [token.token for result in counting.run(engine) for token in result.sampled]
    assert [(chunk.start, chunk.end) for batch in model.batches for chunk in batch] == [(0, 7), (6, 7)]
    assert sampled == [10] * fields.get("samples", 1)


def test_who_ends_under_a_step_in_vain_keeps_its_blocks_until_that_is_over() -> None:
    engine = make(Guessed(empty=(1,)), ahead=True)
    seq = sequence(7, max_tokens=9)
    engine.add(seq)
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert seq.in_flight, "a step behind the token that did not come is under way"
    engine.sequences.release(seq)
    engine.check_integrity()
    assert engine.blocks.num_free + engine.blocks.num_cached < engine.blocks.num_total
    engine.compute(engine.schedule(0.0))
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_only_who_runs_ahead_is_in_the_step_behind() -> None:
    model = Guessed()
    engine = make(model, ahead=True)
    ahead, waits = sequence(5, first=0, max_tokens=4), sequence(5, first=60, max_tokens=4, runs_ahead=False)
    for seq in (ahead, waits):
        engine.add(seq)
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert [[chunk.sequence for chunk in batch] for batch in model.batches] == [[ahead, waits], [ahead], [ahead, waits]]


@pytest.mark.parametrize("guess", [(11, 12), (11, 99), (11,)])
def test_a_guess_is_checked_once(guess: tuple[int, ...]) -> None:
    model = Guessed()
    engine = make(model)
    seq = sequence(5, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    run(engine, seq, [guess])
    assert [batch[0].length for batch in model.batches][:4] == [5, 1 + len(guess), 1, 1]


def test_nobody_loses_blocks_for_a_guess() -> None:
    engine = make(Guessed(), num_blocks=17)
    old, young = sequence(31, first=0, max_tokens=9, runs_ahead=False), sequence(24, first=40, max_tokens=9)
    for seq in (old, young):
        engine.add(seq)
    engine.compute(engine.schedule(0.0))
    lease = engine.blocks.allocate(engine.blocks.num_free - 1)
    engine.propose(old, (11, 12))
    plan = engine.schedule(0.0)
    result = engine.compute(plan)
    assert not plan.preempted
    assert [sampled.token for sampled in result.sampled] == [11, 11]
    engine.blocks.release(lease.blocks)


def test_a_guess_gets_the_blocks_that_are_left() -> None:
    engine = make(Guessed(), num_blocks=5, max_model_len=16)
    seq = sequence(5, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    given = run(engine, seq, [(11, 12), (14, 15)])
    assert tokens(given) == [[10], [11, 12, 13], [14, 15, 16], [17], [18]], "the second guess begins a block"


def test_no_step_waits_for_the_blocks_of_a_guess() -> None:
    engine = make(Guessed(), ahead=True, num_blocks=17)
    guessed, ahead = sequence(31, first=0, max_tokens=9, runs_ahead=False), sequence(24, first=40, max_tokens=9)
    for seq in (guessed, ahead):
        engine.add(seq)
    for _ in range(2):
        engine.compute(engine.schedule(0.0))
    lease = engine.blocks.allocate(engine.blocks.num_free)
    engine.propose(guessed, (11, 12))
    assert ahead.in_flight
    plan = engine.schedule(0.0)
    assert [(chunk.sequence, chunk.length) for chunk in plan.chunks] == [(guessed, 1), (ahead, 1)]
    engine.compute(plan)
    engine.blocks.release(lease.blocks)


def test_who_is_preempted_forgets_its_guess() -> None:
    engine = make(Guessed(), num_blocks=17)
    old, young = sequence(30, first=0, max_tokens=9), sequence(27, first=40, max_tokens=9, runs_ahead=False)
    for seq in (old, young):
        engine.add(seq)
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    engine.propose(young, (99, 99))
    assert engine.schedule(0.0).preempted == [young]
    assert not young.draft_tokens


@pytest.mark.parametrize("budget", [1, 4])
def test_who_still_gets_the_blocks_of_its_prompt_takes_no_guess(budget: int) -> None:
    """Its next chunk may end before the guess, which a step launched ahead would then take for tokens."""
    model = Guessed()
    engine = make(model, max_num_batched_tokens=budget, windows=(None, 6))
    seq = sequence(5, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    while seq.num_computed_tokens < 4:
        engine.compute(engine.schedule(0.0))
    engine.propose(seq, (10, 11))
    plan = engine.schedule(0.0)
    assert [chunk.length for chunk in plan.chunks] == [1]
    assert not seq.draft_tokens
    engine.compute(plan)
    assert tokens(run(engine, seq, [(11, 99)]))[:2] == [[11, 12], [13]], "later it does"


@pytest.mark.parametrize(("max_tokens", "num_prompt", "taken"), [(9, 5, 2), (3, 5, 1), (2, 5, 0), (60, 61, 1)])
def test_a_guess_is_cut_to_what_a_step_may_give(max_tokens: int, num_prompt: int, taken: int) -> None:
    engine = make(Guessed())
    seq = sequence(num_prompt, first=0, max_tokens=max_tokens, runs_ahead=False)
    assert not seq.takes_drafts
    engine.add(seq)
    engine.compute(engine.schedule(0.0))
    assert seq.takes_drafts
    engine.propose(seq, (11, 12, 13, 14))
    assert seq.draft_tokens == (11, 12, 13, 14)[:taken]


def test_forks_take_guesses_as_what_they_were_forked_from() -> None:
    engine = make(Guessed())
    engine.add(sequence(5, samples=2, max_tokens=9, runs_ahead=False))
    forks = [sampled.sequence for sampled in engine.compute(engine.schedule(0.0)).sampled]
    assert len(forks) == 2
    assert all(fork.takes_drafts for fork in forks)


@pytest.mark.parametrize(
    "change", [{"runs_ahead": True}, {"presence_penalty": 0.5}, {"bad_words_token_ids": ((7, 8),)}]
)
def test_who_takes_no_guess(change: dict[str, Any]) -> None:
    engine = make(Guessed())
    seq = sequence(5, max_tokens=9, **{"runs_ahead": False, **change})
    engine.add(seq)
    engine.compute(engine.schedule(0.0))
    assert not seq.takes_drafts


def test_who_does_not_generate_yet_takes_no_guess() -> None:
    engine = make(Guessed(), max_num_batched_tokens=4)
    for seq in (sequence(5, runs_ahead=False, hand_off=True), sequence(5, first=0, runs_ahead=False, samples=2)):
        engine.add(seq)
        engine.compute(engine.schedule(0.0))
        assert seq.num_computed_tokens == seq.num_tokens - 1
        assert not seq.takes_drafts
        engine.sequences.release(seq)
    assert not sequence(1, runs_ahead=False).takes_drafts, "it waits"


# ---- with a model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


WISHES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5, "ignore_eos": True},
    "forced": {"temperature": 1.0, "logit_bias": {tiny_models.EOS: 100.0}, "min_tokens": 6},
    "forks": {"temperature": 0.9, "seed": 8, "ignore_eos": True},
}
"""What makes samplers differ, all of it in one batch."""


Said = dict[tuple[str, int], list[SampledToken]]


def say(folder: Path, answers: Said | None = None, num_blocks: int = 200) -> tuple[Said, set[int], int]:
    """All that a model says to WISHES, how many tokens a step gave a sequence, and how many were preempted.

    answers: what is said without guesses. Before each step 0 to 3 tokens of it are proposed, and a wrong one."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=96,
        vocab_size=tiny_models.VOCAB_SIZE,
        eos_token_ids=(tiny_models.EOS,),
        max_num_batched_tokens=20,
        num_speculative_tokens=4,
        async_scheduling=True,
    )
    engine = Engine(config, TorchModelRunner(loader.load_model(Checkpoint.open(folder), device="cpu"), config))
    for number, (name, wishes) in enumerate(WISHES.items()):
        prompt = tuple((7 * i + number) % tiny_models.VOCAB_SIZE for i in range(30 + number))
        sampling = SamplingParams(**{"max_tokens": 40, "num_logprobs": 2, **wishes})  # type: ignore[arg-type]
        samples = [0, 1] if name == "forks" else [0]
        seq = Sequence(AttemptId(1, name, 0), samples, prompt, sampling, arrived_s=float(number))
        seq.runs_ahead = answers is None
        engine.add(seq)
    said: Said = defaultdict(list)
    together, rng = set[int](), random.Random(3)
    while engine.has_work:
        for seq in {own[-1].sequence for own in said.values()}:
            if answers is not None and seq.takes_drafts:
                index = seq.num_output_tokens
                answer = answers[seq.attempt_id.request_id, seq.samples[0]]
                to_come = [s.token for s in answer[index : index + rng.randrange(4)]]
                engine.propose(seq, [*to_come, tiny_models.EOS + 1])
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
        for sampled in result.sampled:
            said[sampled.sequence.attempt_id.request_id, sampled.sample].append(sampled)
        together |= set(Counter(id(sampled.sequence) for sampled in result.sampled).values())
    return said, together, engine.num_preemptions


@pytest.mark.parametrize("num_blocks", [200, 8])
def test_a_model_says_the_same_with_guesses(folder: Path, num_blocks: int) -> None:
    """Noise, min_tokens and logprobs are those of each position, whatever else a step computes for the sequence."""
    answers, _, _ = say(folder)
    said, together, num_preemptions = say(folder, answers, num_blocks)
    assert together >= {1, 2, 3, 4}
    assert bool(num_preemptions) == (num_blocks < 200)
    assert said.keys() == answers.keys()
    for key, own in said.items():
        expected = answers[key]
        assert [(s.index, s.token, s.finish) for s in own] == [(s.index, s.token, s.finish) for s in expected]
        for got, want in zip(own, expected, strict=True):
            assert got.logprobs is not None
            assert want.logprobs is not None
            assert got.logprobs.logprob == pytest.approx(want.logprobs.logprob, abs=1e-3)
            assert [token for token, _ in got.logprobs.top] == [token for token, _ in want.logprobs.top]
