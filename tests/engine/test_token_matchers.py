"""Sequences whose output must match something: when they run, what ends them, and that they hold up no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.sampling import FinishReason
from engine.engine import Engine
from engine.sequence import Sequence
from engine.step import SampledToken
from tests.engine.counting import make, run, sequence


class Ends:
    """Takes any tokens, and is finished after so many."""

    def __init__(self, after: int, ready: bool = True, breaks_at: int = -1) -> None:
        self.after = after
        self.ready = ready
        self.breaks_at = breaks_at
        self.tokens: list[int] = []

    @property
    def error(self) -> str | None:
        return "broken" if self.breaks_at in self.tokens else None

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.after

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def forced(self) -> list[int]:
        return []

    def fork(self, tokens: Iterable[int] = ()) -> Ends:
        other = Ends(self.after, self.ready, self.breaks_at)
        other.tokens = [*self.tokens, *tokens]
        return other

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = -1


def constrained(matcher: Ends, samples: int = 1, first: int = 0, hand_off: bool = False) -> Sequence:
    seq = sequence(5, first=first, samples=samples, max_tokens=20)
    seq.matcher, seq.runs_ahead, seq.hand_off = matcher, False, hand_off
    return seq


def sampled(engine: Engine) -> list[SampledToken]:
    return [token for result in run(engine) for token in result.sampled]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_ends_with_its_matcher_which_has_seen_each_token_once(ahead: bool) -> None:
    engine, _ = make(async_scheduling=ahead)
    seq = constrained(matcher := Ends(after=3))
    engine.add(seq)
    tokens = sampled(engine)
    assert [token.finish for token in tokens] == [None, None, FinishReason.STOP]
    assert matcher.tokens == [token.token for token in tokens] == [10, 11, 12]


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_have_matchers_of_their_own_from_their_first_token_on(ahead: bool) -> None:
    engine, _ = make(async_scheduling=ahead)
    engine.add(seq := constrained(prompts := Ends(after=3), samples=2))
    tokens = sampled(engine)
    assert sorted((token.sample, token.token) for token in tokens) == [(s, t) for s in (0, 1) for t in (10, 11, 12)]
    assert prompts.tokens == []
    matchers = {token.sequence.matcher for token in tokens if token.sequence is not seq}
    assert [m.tokens for m in matchers if isinstance(m, Ends)] == [[10, 11, 12]] * 2


def test_a_prompt_to_hand_off_tells_whether_its_first_token_completed_the_output() -> None:
    engine, _ = make()
    for after, first in ((1, 0), (2, 40)):
        engine.add(constrained(Ends(after), samples=2, first=first, hand_off=True))
    ends = {token.sequence.matcher.after: token.finish for token in sampled(engine) if token.sequence.matcher}  # type: ignore[attr-defined]
    assert ends == {1: FinishReason.STOP, 2: None}


def test_an_adopted_sample_takes_over_from_its_output() -> None:
    engine, _ = make()
    seq = constrained(Ends(after=4))
    seq.block_table = engine.allocate(2)
    children = engine.adopt(seq, {0: (50,), 1: (51,)}, engine.allocate(1))
    assert [child.matcher.tokens for child in children if isinstance(child.matcher, Ends)] == [[50], [51]]
    assert not any(child.runs_ahead for child in children)


@pytest.mark.parametrize("ahead", [False, True])
def test_while_a_matcher_is_compiled_others_go_ahead_of_its_sequence(ahead: bool) -> None:
    engine, model = make(async_scheduling=ahead, max_num_seqs=2)
    engine.add(waits := constrained(compiling := Ends(after=2, ready=False)))
    others = [sequence(3, first=40 + i) for i in range(2)]
    for other in others:
        engine.add(other)
    run_until_idle(engine)
    assert waits not in {chunk.sequence for batch in model.batches for chunk in batch}
    assert engine.num_waiting == 1
    engine.check_integrity()
    compiling.ready = True
    assert [token.token for token in sampled(engine)] == [10, 11]


def test_a_running_sequence_is_in_no_step_until_its_matcher_is_ready() -> None:
    engine, model = make()
    seq = constrained(Ends(after=3, ready=False))
    seq.block_table = engine.allocate(2)
    (child,) = engine.adopt(seq, {0: (50,)}, [])
    run_until_idle(engine)
    assert model.batches == []
    assert isinstance(child.matcher, Ends)
    child.matcher.ready = True
    assert [token.finish for token in sampled(engine)] == [None, FinishReason.STOP]


@pytest.mark.parametrize("max_tokens", [20, 2])
def test_a_token_with_which_a_matcher_breaks_is_not_told_even_if_it_would_be_the_last(max_tokens: int) -> None:
    engine, _ = make()
    seq = constrained(Ends(after=9, breaks_at=11))
    seq.sampling = dataclasses.replace(seq.sampling, max_tokens=max_tokens)
    engine.add(seq)
    engine.add(sequence(5, first=30, max_tokens=20))
    failed, told = [], list[SampledToken]()
    while not failed:
        result = engine.compute(engine.schedule(0.0))
        failed, told = result.failed, told + result.sampled
    assert failed == [(seq, "broken")]
    assert [token.token for token in told if token.sequence is seq] == [10]
    engine.sequences.release(seq)


@pytest.mark.parametrize("max_num_seqs", [4, 1])
def test_samples_whose_matchers_break_with_their_first_tokens_do_not_go_on(max_num_seqs: int) -> None:
    """Nobody is told of their own sequences, so nobody would end these."""
    engine, _ = make(max_num_seqs=max_num_seqs)
    engine.add(constrained(Ends(after=9, breaks_at=10), samples=2))
    result = engine.compute(engine.schedule(0.0))
    assert [(seq.samples, failure) for seq, failure in result.failed] == [([0], "broken"), ([1], "broken")]
    assert not result.sampled
    assert not engine.has_work
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def run_until_idle(engine: Engine, turns: int = 30) -> None:
    for _ in range(turns):
        engine.compute(engine.schedule(0.0))
