"""How fast an engine would compute a prompt beside its current decodes, for a router that chooses between nodes."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.prompt_budget import PromptBudget
from engine.step_size import EMPTY, StepSize
from engine.step_time import StepTime

PERIOD_S = 0.25
"""The rate is computed at most once in this time: it is wanted in each turn, and costs as much as planning a step."""


class PromptRate:
    """Keeps the rate for `PERIOD_S`."""

    def __init__(self, config: EngineConfig, step_time: StepTime) -> None:
        self._config = config
        self._step_time = step_time
        self._tokens_per_s = 0.0
        self._due: float | None = None

    def tokens_per_s(self, decodes: StepSize, now: float) -> float:
        """Prompt tokens per second, rounded to two digits, for a prompt from its first token on. 0: not known yet.

        decodes: the running decodes, as a step of their own; empty if nothing runs.
        """
        if self._due is None or now >= self._due:
            self._due = now + PERIOD_S
            self._tokens_per_s = float(f"{self._compute(decodes):.2g}")
        return self._tokens_per_s

    def _compute(self, decodes: StepSize) -> float:
        limit_s, trusted = self._config.target_itl_s, self._step_time.most_trusted_tokens
        if limit_s is None or not trusted:
            return 0.0
        budget = PromptBudget(self._config, self._step_time, decodes, limit_s if decodes != EMPTY else None)
        length = budget.fitting(0, min(trusted, self._config.max_num_batched_tokens))
        took_s = self._step_time.predict(budget.with_chunk(0, length))
        return length / took_s if took_s else 0.0
