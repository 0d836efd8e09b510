"""How the time of steps is spent: running totals, which are always kept.

    end of step N -- gap -- schedule -- launch --> step N+1 computes (device) --> output

They cost a handful of additions and four clock readings per step: about a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.step_size import StepSize

PHASES = ("schedule", "launch", "device", "output", "gap")
KINDS = ("prompt", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals since the start. seconds: by phase. num_steps: by the content of the steps. num_tokens: computed tokens,
    of prompts and of decodes."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    num_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("prompt", "decode"), 0))


class StepCounters:
    """Engine's thread only.

    schedule, launch and output are times of the host: deciding the step, building its inputs and launching it, applying
    its choices. device: the time that the device computes, as far as the beginning and end are known. gap: the time
    that the device idles between two steps although there is work.
    """

    def __init__(self) -> None:
        self._totals = StepTotals()
        self._idle_since: float | None = None  # None: the device is busy, or there is no work
        self._watcher: Callable[[], None] | None = None

    def watch(self, call: Callable[[], None] | None) -> None:
        """Call `call` at the end of each step from now on; None: nothing."""
        self._watcher = call

    def scheduled(self, began: float, launches: bool) -> None:
        """began: of `time.perf_counter`, as all times here. launches: there is a step."""
        if launches:
            self._totals.seconds["schedule"] += time.perf_counter() - began
        else:
            self._idle_since = None  # what ran has ended, or waits: the device idles for lack of work

    def launched(self, began: float, computes: bool) -> None:
        """computes: the launch takes as long as the step itself, as on a CPU."""
        now, seconds = time.perf_counter(), self._totals.seconds
        seconds["device" if computes else "launch"] += now - began
        if self._idle_since is not None:
            seconds["gap"] += began - self._idle_since
            self._idle_since = None

    def retired(self, size: StepSize, num_tokens: int, device_s: float, began: float, goes_on: bool) -> None:
        """device_s: how long the device took for the step, as far as that is known and was not counted at the launch.
        began: the end of the step. goes_on: there is work, and nothing is launched yet."""
        totals, num_prompt_tokens = self._totals, size.num_prompt_tokens
        totals.seconds["device"] += device_s
        totals.seconds["output"] += time.perf_counter() - began
        totals.num_tokens["prompt"] += num_prompt_tokens
        totals.num_tokens["decode"] += num_tokens - num_prompt_tokens
        kind = "decode" if not num_prompt_tokens else "mixed" if num_tokens > num_prompt_tokens else "prompt"
        totals.num_steps[kind] += 1
        self._idle_since = began if goes_on else None
        if self._watcher is not None:
            self._watcher()

    def totals(self) -> StepTotals:
        """A copy."""
        totals = self._totals
        return StepTotals(dict(totals.seconds), dict(totals.num_steps), dict(totals.num_tokens))
