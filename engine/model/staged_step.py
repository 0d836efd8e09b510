"""Steps of a model in stages: rank 0 computes the first stage at the launch, and samples when the last one's logits
come.

    rank 0   stage 0 of N | stage 0 of N+1           | sample N, stage 0 of N+2 ...
    rank 1                | stage 1 of N, its logits | stage 1 of N+1 ...

A separate thread waits for the logits, so that the engine's thread can launch the next steps meanwhile. On a GPU, it
receives them on its own stream, since the engine's stream is full of next steps. It then wakes the engine's thread,
which samples: on a GPU it launches the sampling, behind the first stage of these next steps, and is woken again when
that is done. Steps are sampled in the order of their launches, as with one stage.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from baton.prompt_logprobs import PromptLogprobs
from baton_kernels.event_thread import EventThread
from engine.model.parallel.group import COLLECTIVE_TIMEOUT_S
from engine.model.parallel.pipeline import Pipeline
from engine.model.rank import Score
from engine.model.rank_step import ALL_TOKENS, RankStep
from engine.sequence import Sequence
from engine.step import Choice, Chunk, LaunchedStep

Sample = Callable[[Tensor], LaunchedStep]
"""Makes a step's choices from its logits, [num_logits, vocab_size]."""


class StagedSteps:
    """On rank 0, the launched steps that the stages still compute, or that wait to be sampled. All calls belong to the
    engine's thread.

    num_layers: of all stages. wake: is called, on another thread, when a step's logits are there, so that `is_done`
    samples it. It is also called when the first stage of a step that ends a prompt to hand off is computed: its KV can
    leave while later stages compute theirs. On a CPU that is at the launch, on a GPU `watch` tells.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        vocab_size: int,
        num_layers: int,
        wake: Callable[[], None] | None,
        watch: EventThread | None = None,
    ) -> None:
        self.num_layers, self.num_own_layers = num_layers, len(pipeline.stage.layers(num_layers))
        self._pipeline, self._vocab_size, self._wake = pipeline, vocab_size, wake
        self._watch = watch
        device = pipeline.everyone.device
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._receiver = ThreadPoolExecutor(1, "last-stage")
        self._unsampled: deque[StagedStep] = deque()
        self._row_was_freed = False

    def launched(self, chunks: Seq[Chunk], step: RankStep, score: Score, sample: Sample) -> StagedStep:
        """Add a step whose first stage rank 0 has computed, or launched on its GPU, and which all other ranks have been
        sent."""
        computed = self._mark()
        logits = self._receiver.submit(self._receive, step, score)
        if (wake := self._wake) is not None:
            logits.add_done_callback(lambda _: wake())
            if any(chunk.samples_token and chunk.sequence.hand_off for chunk in chunks):
                self._when(computed, wake)
        staged = StagedStep(self, {chunk.sequence for chunk in chunks}, computed, logits, sample)
        self._unsampled.append(staged)
        return staged

    def before_launch(self, chunks: Seq[Chunk]) -> None:
        """Sample earlier steps that the launch depends on: a chunk contains the token that such a step chooses, or a
        row that it uses may be given to another sequence."""
        if self._row_was_freed or any(_goes_on(chunk) for chunk in chunks):
            self.settle()

    def forgotten(self, sequence: Sequence) -> None:
        """Record that the sequence's row is free."""
        self._row_was_freed |= any(sequence in step.sequences for step in self._unsampled)

    def settle(self, last: StagedStep | None = None) -> None:
        """Wait for the logits of the steps up to `last`, or of all steps, and sample them. Raises RuntimeError when a
        rank is lost or hangs."""
        while self._unsampled and (last is None or last.sampled is None):
            self._sample_oldest()

    def sample_arrived(self) -> None:
        """Sample the steps whose logits are there. Raises RuntimeError as `settle` does."""
        while self._unsampled and self._unsampled[0].has_logits():
            self._sample_oldest()

    def _sample_oldest(self) -> None:
        self._unsampled[0].sample()
        self._unsampled.popleft()
        self._row_was_freed &= bool(self._unsampled)

    def _mark(self) -> torch.cuda.Event | None:
        """An event after everything queued so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _when(self, computed: torch.cuda.Event | None, wake: Callable[[], None]) -> None:
        if computed is None:
            wake()
        elif self._watch is not None:
            self._watch.add(computed, wake)

    @torch.inference_mode()
    def _receive(self, step: RankStep, score: Score) -> Tensor:
        """Wait for the step's logits, after passing those to score to `score`. All are there when this returns, also on
        a GPU."""
        stream = self._stream
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for index, (_, count) in enumerate(step.scored.tolist()):
                score(index, self._pipeline.receive_logits(count, self._vocab_size))
            num_rows = step.num_tokens if step.num_logits == ALL_TOKENS else step.num_logits
            logits = self._pipeline.receive_logits(num_rows, self._vocab_size)
        if stream is not None:
            stream.synchronize()
        return logits


class StagedStep:
    """Implements `engine.step.LaunchedStep`. computed: the event after which the first stage is computed; None: it is
    already. sampled: the step once its choices are made, or launched on a GPU."""

    def __init__(
        self,
        steps: StagedSteps,
        sequences: set[Sequence],
        computed: torch.cuda.Event | None,
        logits: Future[Tensor],
        sample: Sample,
    ) -> None:
        self.sequences = sequences
        self.sampled: LaunchedStep | None = None
        self._steps, self._computed, self._logits, self._sample = steps, computed, logits, sample

    def has_logits(self) -> bool:
        """Whether the logits are there, so that `sample` need not wait. All stages have then computed the step."""
        return self._logits.done()

    def sample(self) -> None:
        """Wait for the logits, and make the choices, or launch that on the GPU. Raises RuntimeError."""
        try:
            logits = self._logits.result(COLLECTIVE_TIMEOUT_S)
        except TimeoutError as error:
            raise RuntimeError(f"no logits from the last stage for {COLLECTIVE_TIMEOUT_S:.0f} s") from error
        if logits.is_cuda:
            logits.record_stream(torch.cuda.current_stream())  # they were allocated on another stream
        self.sampled = self._sample(logits)

    def is_done(self) -> bool:
        self._steps.sample_arrived()
        return self.sampled is not None and self.sampled.is_done()

    def num_layers_done(self) -> int:
        if self.has_logits():
            return self._steps.num_layers
        return self._steps.num_own_layers if self._computed is None or self._computed.query() else 0  # type: ignore[no-untyped-call]

    def wait(self) -> list[list[Choice]]:
        return self._settled().wait()

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return self._settled().prompt_logprobs()

    def _settled(self) -> LaunchedStep:
        self._steps.settle(self)
        assert self.sampled is not None
        return self.sampled


def _goes_on(chunk: Chunk) -> bool:
    """Whether the chunk has a token that the host does not know yet."""
    return chunk.end > len(chunk.sequence.tokens) + len(chunk.draft_tokens)
