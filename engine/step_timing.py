"""How long steps take, learned from retired steps: when to launch the next step, and how fast a prompt would be."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.in_flight import InFlight
from engine.pace import Pace
from engine.prompt_rate import PromptRate
from engine.step_size import EMPTY, StepSize
from engine.step_time import StepTime


class StepTiming:
    """`pace` records each launch and says when the next one is due; `step_time` predicts how long a step would take.
    Both are in seconds by `clock`, the engine's."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.step_time = StepTime(config.padding)
        self.pace = Pace(self.step_time.predict_least)
        self._config = config
        self._clock = clock
        self._prompt_rate = PromptRate(config, self.step_time)
        self._decodes = EMPTY  # the size of the latest step that has retired, without its prompts

    def prompt_tokens_per_s(self, is_running: bool) -> float:
        """How fast a prompt would be computed beside the running sequences, without exceeding `target_itl_s`. 0: not
        known, or there is no such limit."""
        return self._prompt_rate.tokens_per_s(self._decodes if is_running else EMPTY, self._clock())

    def learn(self, retired: InFlight) -> float:
        """Learn how long a step took: on a device of its own since the end of the step before, else including its turn.
        Returns how long the device computed it; 0 if that is unknown."""
        now = self._clock()
        device_s = took_s = self.pace.retired(now)
        if self._config.target_itl_s is None:
            return device_s or 0.0
        if not self._config.async_scheduling:
            took_s = now - retired.decided
        self._decodes = StepSize.of(chunk for chunk in retired.chunks if chunk.is_decode)
        self.step_time.learn_launch(retired.size, retired.launch_s)
        if took_s is not None:  # a launch may have computed the step, on a CPU
            self.step_time.learn(retired.size, max(took_s, retired.launch_s))
        return device_s or 0.0
