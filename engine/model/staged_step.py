"""Steps of a model in stages: rank 0 computes the first stage at the launch, and samples when the last one's logits
come.

    rank 0   stage 0 of N | stage 0 of N+1           | sample N, stage 0 of N+2 ...
    rank 1                | stage 1 of N, its logits | stage 1 of N+1 ...

A thread waits for the logits, so that the engine's thread can launch the next step meanwhile. Steps are sampled in the
order of their launches, as those of one stage are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from baton.prompt_logprobs import PromptLogprobs
from engine.model.parallel.group import COLLECTIVE_TIMEOUT_S
from engine.model.parallel.pipeline import Pipeline
from engine.model.rank import Score
from engine.model.rank_step import ALL_TOKENS, RankStep
from engine.sequence import Sequence
from engine.step import Choice, Chunk, LaunchedStep

Sample = Callable[[Tensor], LaunchedStep]
"""Makes a step's choices from its logits, [num_logits, vocab_size]."""


class StagedSteps:
    """The steps that are in stages, or wait to be sampled; on rank 0. All calls belong to the engine's thread.

    num_layers: of all stages. wake: is called, on another thread, when a step's logits are there; and at the launch of
    a step that ends a prompt to hand off, whose KV of the first stage can leave while later ones compute theirs.
    """

    def __init__(self, pipeline: Pipeline, vocab_size: int, num_layers: int, wake: Callable[[], None] | None) -> None:
        self.num_layers, self.num_own_layers = num_layers, len(pipeline.stage.layers(num_layers))
        self._pipeline, self._vocab_size, self._wake = pipeline, vocab_size, wake
        self._receiver = ThreadPoolExecutor(1, "last-stage")
        self._unsampled: deque[StagedStep] = deque()
        self._row_was_freed = False

    def launched(self, chunks: Seq[Chunk], step: RankStep, score: Score, sample: Sample) -> StagedStep:
        """Rank 0 has computed its stage, and all others have been sent the step."""
        logits = self._receiver.submit(self._receive, step, score)
        if (wake := self._wake) is not None:
            logits.add_done_callback(lambda _: wake())
            if any(chunk.samples_token and chunk.sequence.hand_off for chunk in chunks):
                wake()
        staged = StagedStep(self, {chunk.sequence for chunk in chunks}, logits, sample)
        self._unsampled.append(staged)
        return staged

    def before_launch(self, chunks: Seq[Chunk]) -> None:
        """Have earlier steps sampled where the launch must not go before: a chunk has the token that one of them
        chooses, or a row that one of them uses may be given anew."""
        if self._row_was_freed or any(_goes_on(chunk) for chunk in chunks):
            self.settle()

    def forgotten(self, sequence: Sequence) -> None:
        """Its row is free."""
        self._row_was_freed |= any(sequence in step.sequences for step in self._unsampled)

    def settle(self, last: StagedStep | None = None) -> None:
        """Wait for the steps up to the last, or for all, and sample them. Raises RuntimeError when a rank is lost."""
        while self._unsampled and (last is None or last.sampled is None):
            self._unsampled[0].sample()
            self._unsampled.popleft()
        self._row_was_freed &= bool(self._unsampled)

    @torch.inference_mode()
    def _receive(self, step: RankStep, score: Score) -> Tensor:
        for index, (_, count) in enumerate(step.scored.tolist()):
            score(index, self._pipeline.receive_logits(count, self._vocab_size))
        num_rows = step.num_tokens if step.num_logits == ALL_TOKENS else step.num_logits
        return self._pipeline.receive_logits(num_rows, self._vocab_size)


class StagedStep:
    """Implements `engine.step.LaunchedStep`. sampled: the step as it is once its choices are made."""

    def __init__(self, steps: StagedSteps, sequences: set[Sequence], logits: Future[Tensor], sample: Sample) -> None:
        self.sequences = sequences
        self.sampled: LaunchedStep | None = None
        self._steps, self._logits, self._sample = steps, logits, sample

    def sample(self) -> None:
        self.sampled = self._sample(self._logits.result(COLLECTIVE_TIMEOUT_S))

    def is_done(self) -> bool:
        return self._logits.done()

    def num_layers_done(self) -> int:
        return self._steps.num_layers if self.is_done() else self._steps.num_own_layers  # the first stage's, at once

    def wait(self) -> list[list[Choice]]:
        return self._settled().wait()

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return self._settled().prompt_logprobs()

    def _settled(self) -> LaunchedStep:
        self._steps.settle(self)
        assert self.sampled is not None
        return self.sampled


def _goes_on(chunk: Chunk) -> bool:
    """Whether it has a token that the host does not know."""
    return chunk.end > len(chunk.sequence.tokens) + len(chunk.draft_tokens)
