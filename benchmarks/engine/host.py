"""Measures the host's time in a step: a model runner that times the calls of another."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton.prompt_logprobs import PromptLogprobs
from engine.model.runner import TorchStep
from engine.sequence import Sequence
from engine.step import Begun, Choice, Chunk, LaunchedStep, ModelRunner


@dataclass(slots=True)
class HostTimes:
    """Seconds since the last `clear`, summed over all steps. `launch`: the runner prepares and launches a step.
    `wait`: idle until the device finishes a step, so above zero where the host is the faster of the two."""

    launch: float = 0.0
    wait: float = 0.0

    def clear(self) -> None:
        self.launch = self.wait = 0.0


class TimedRunner:
    """Forwards all calls and times them. Implements `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.times = HostTimes()
        self._runner = runner

    @property
    def only_launches(self) -> bool:
        return self._runner.only_launches

    def launch(self, chunks: Seq[Chunk], begun: Begun = lambda waited_s: None) -> LaunchedStep:
        began = time.perf_counter()
        launched = _TimedStep(self._runner.launch(chunks, begun), self.times)
        self.times.launch += time.perf_counter() - began
        return launched

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)

    def forget(self, sequence: Sequence) -> None:
        self._runner.forget(sequence)


@dataclass(frozen=True, slots=True)
class _TimedStep:
    step: LaunchedStep
    times: HostTimes

    def is_done(self) -> bool:
        return self.step.is_done()

    def num_layers_done(self) -> int:
        return self.step.num_layers_done()

    def wait(self) -> list[list[Choice]]:
        if isinstance(self.step, TorchStep) and self.step.done is not None:
            began = time.perf_counter()
            self.step.done.synchronize()
            self.times.wait += time.perf_counter() - began
        return self.step.wait()

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return self.step.prompt_logprobs()
