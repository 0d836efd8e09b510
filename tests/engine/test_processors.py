"""Sequences with logits processors: when they run, and what becomes of one whose processors fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.logits_processor import LogitsProcessorChain
from engine.model import batch
from engine.sequence import Sequence
from engine.step import Begun, Choice, Chunk
from tests.engine.counting import Counting, Launched, make, run, sequence


def unchanged(output: list[int], logits: Tensor) -> Tensor:
    return logits


CHAIN = LogitsProcessorChain([("unchanged", unchanged)])


class Failing(Counting):
    """Fails for one sequence from some output on."""

    failing: Sequence | None = None

    def launch(self, chunks: Any, begun: Begun = lambda waited_s: None) -> Launched:
        step = super().launch(chunks, begun)
        for chunk, choices in zip(self.batches[-1], step.choices, strict=True):
            if chunk.sequence.attempt_id == (self.failing and self.failing.attempt_id) and choices:
                choices[-1] = Choice(0, failure="it failed")
        return step


@pytest.mark.parametrize("ahead", [False, True])
def test_its_next_step_waits_for_its_last_token(ahead: bool) -> None:
    engine, model = make(async_scheduling=ahead)
    seq = sequence(5, max_tokens=4, processors=CHAIN)
    engine.add(seq)
    run(engine)
    assert [(chunk.start, chunk.length) for step in model.batches for chunk in step] == [(0, 5), (5, 1), (6, 1), (7, 1)]
    assert not seq.runs_ahead


def test_its_forks_have_them_too() -> None:
    engine, _ = make()
    engine.add(sequence(samples=2, processors=CHAIN))
    sampled = engine.compute(engine.schedule(0.0)).sampled
    assert [(token.sequence.processors, token.sequence.runs_ahead) for token in sampled] == [(CHAIN, False)] * 2


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("hand_off", [False, True])
def test_one_that_fails_gets_no_token_and_others_do(samples: int, hand_off: bool) -> None:
    model: Any = Failing()
    engine = Engine(make()[0].config, model)
    bad = sequence(5, first=0, samples=samples, hand_off=hand_off, processors=CHAIN)
    good = sequence(5, first=40, max_tokens=3)
    engine.add(bad)
    engine.add(good)
    model.failing = bad
    result = engine.compute(engine.schedule(0.0))
    assert result.failed == [(bad, "it failed")]
    assert [token.sequence for token in result.sampled] == [good]
    assert bad.num_output_tokens == 0
    engine.check_integrity()
    engine.sequences.release(bad)
    run(engine)
    assert good.num_output_tokens == 3


def test_each_sample_of_a_step_is_processed_after_its_own_tokens() -> None:
    plain, processed = sequence(3, first=10), sequence(2, first=20, samples=2, processors=CHAIN)
    later = sequence(2, first=30, processors=CHAIN, output=[5, 6])
    chunks = [Chunk.of(later, 3, 1), Chunk.of(plain, 0, 3), Chunk.of(processed, 0, 2)]
    found = batch.sample_batch(chunks, [0, 1, 2]).to_process
    assert [(one.choice, one.prompt_tokens, one.output_tokens) for one in found] == [
        (0, (30, 31), (5, 6)),
        (2, (20, 21), ()),
        (3, (20, 21), ()),
    ]
    assert torch.equal(CHAIN((), (), torch.ones(2)), torch.ones(2))
