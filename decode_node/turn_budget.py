"""How many blocks a decode node's turn may grant and adopt without delaying a launch or a token.

A long prompt takes the engine's thread milliseconds to grant and to adopt. So the first half of a turn, which ends with
a launch, leaves that to the second half: by then the tokens are out, but the work must fit before the next launch.
While there are long prompts, steps are launched early. Then no launch is late, but the next tokens might be. So only
one long prompt is granted or adopted with each step, when the step has just begun and its end is furthest away.
"""

from __future__ import annotations

import math

from decode_node.leases import is_long
from engine.engine import Engine
from engine.pace import SLACK_S
from engine.step import StepResult

BLOCK_S = 2.5e-6
"""How long each block that is granted or adopted before a launch delays it, at most (measured beside an H100: 1.5 us to
grant, 1.3 to adopt, and 0.5 to 1 more for the launch of the first step with it)."""
MOST_BRIEF = 2
"""After this many launches in a row, long prompts are granted and adopted even if that makes the next launch late."""


class Budget:
    """How many blocks half a turn may still grant and adopt. one_long: after a long prompt it takes nothing more,
    whatever is left."""

    def __init__(self, num_blocks: float = math.inf, one_long: bool = False) -> None:
        self._num_blocks, self._one_long = num_blocks, one_long

    def spend(self, num_blocks: int) -> bool:
        """Take a prompt with this many blocks. False: it has to wait for another turn, and nothing is spent."""
        if num_blocks > self._num_blocks:
            return False
        is_last = self._one_long and is_long(num_blocks)
        self._num_blocks = 0 if is_last else self._num_blocks - num_blocks
        return True


class TurnBudget:
    """The budgets of both halves of each turn. `is_brief`: the first half leaves long work to the second."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_brief = False
        self._num_brief = 0  # launches since the last turn with time for all prompts

    def before_launch(self) -> Budget:
        engine = self._engine
        may_launch = engine.has_room or engine.launches_early
        self.is_brief = bool(engine.only_launches and may_launch and engine.num_running)
        return self._budget(SLACK_S if self.is_brief else math.inf)

    def after_launch(self, launched: bool, result: StepResult, now: float) -> Budget:
        """launched: whether this turn launched a step; result: the results of the steps that it retired."""
        self._num_brief += launched
        spare_s = self._spare_s(launched, result, now)
        if spare_s == math.inf:
            self._num_brief = 0
        return self._budget(spare_s)

    def _budget(self, spare_s: float) -> Budget:
        return Budget(spare_s / BLOCK_S, one_long=self._hurries)

    @property
    def _hurries(self) -> bool:
        """Whether a step runs and the next one is launched already, or will be at once. Then only the turn that passes
        on the running step's tokens may be late."""
        return self._engine.launches_early and self._engine.device_busy_since is not None

    def _spare_s(self, launched: bool, result: StepResult, now: float) -> float:
        if self._hurries and not launched:
            return SLACK_S  # an early step has begun when another has ended, and then the next end is furthest away
        if self._num_brief < MOST_BRIEF:
            if result.num_tokens and self._engine.num_running:
                return SLACK_S  # its tokens are sent after this half, and another turn follows at once
            if (due := self._engine.launch_at) is not None:
                return max(SLACK_S, due - now)
        return math.inf
