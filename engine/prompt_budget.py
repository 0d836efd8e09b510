"""How many prompt tokens a step may have: limited by a number of tokens, and with --target-itl by time.

A prompt in a step makes the step longer, and with it the gap between two tokens of every stream. If the time of a step
is limited, a prompt gets the largest chunk with which the step is predicted to keep the limit. So that no prompt
starves, the first prompt of a step always gets a minimum chunk, even if that exceeds the limit or nothing is known yet.
"""

from __future__ import annotations

import bisect
from dataclasses import replace

from engine.config import EngineConfig
from engine.step_size import StepSize
from engine.step_time import StepTime

LEAST_CHUNK = 32
"""Tokens of the minimum chunk, if the device does not pad; else the chunk fills the smallest padded size with room for
as many, at the same cost."""


class PromptBudget:
    """The budget that is left for prompts in one step.

    size: the step without prompts; forced runs of streams are in it, as prompt tokens. limit_s: the limit of the step's
        time; None: only tokens are limited, as in a step that no stream waits for. num_choices: tokens that the step
        chooses without prompts. Each choice may take a copy of its logits, and memory is there for those of as many
        sequences as may run: if all samples of several prompts made more, all but the first of these prompts wait.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepTime,
        size: StepSize,
        limit_s: float | None,
        num_choices: int = 0,
    ) -> None:
        self._config = config
        self._step_time = step_time
        self._size = size
        self._num_decodes = size.num_seqs
        self._limit_s = limit_s
        self._is_spent = False  # a prompt was cut short
        self._num_choices = num_choices
        self._ends_prompts = False  # a prompt's last token is in the step

    @property
    def has_room(self) -> bool:
        """Whether one more prompt should join the step. See EngineConfig."""
        enough, taken = self._config.saturating_num_tokens, self._size.num_prompt_tokens
        return not self._is_spent and self._left > 0 and (enough is None or taken < enough)

    def fitting(self, start: int, to_go: int, num_samples: int = 1) -> int:
        """The longest chunk for a prompt that continues at token `start` and has `to_go` tokens left. 0: none."""
        wanted = min(to_go, self._left)
        length = wanted if self._limit_s is None else self._within_limit(start, wanted)
        num_choices = self._num_choices + num_samples
        has_too_many = self._ends_prompts and num_choices > self._config.max_num_seqs
        return 0 if length == to_go and has_too_many else length

    def spend(self, start: int, length: int, to_go: int, num_samples: int = 1) -> None:
        """Give the prompt a chunk of this length. If that is not all of the prompt, no other prompt has room."""
        self._is_spent = length < to_go
        self._size = self.with_chunk(start, length)
        if length == to_go:
            self._ends_prompts = True
            self._num_choices += num_samples

    @property
    def _left(self) -> int:
        return self._config.max_num_batched_tokens - self._size.num_prompt_tokens

    def with_chunk(self, start: int, length: int) -> StepSize:
        """The step's size with this prompt chunk."""
        size = self._size
        return replace(
            size,
            num_seqs=size.num_seqs + 1,
            num_prompt_tokens=size.num_prompt_tokens + length,
            num_prompt_pairs=size.num_prompt_pairs + length * (start + length),
        )

    def _within_limit(self, start: int, wanted: int) -> int:
        wanted = self._in_a_graph(start, wanted)
        if wanted <= 0 or self._fits(start, wanted):
            return max(wanted, 0)
        taken = self._size.num_prompt_tokens
        sizes = self._config.padding.sizes(self._num_decodes)
        if sizes:
            lengths = [size - taken for size in sizes if 0 < size - taken < wanted]
        else:
            lengths = list(range(LEAST_CHUNK, wanted, LEAST_CHUNK))
        # The time grows with the length, so the lengths that fit come first.
        num_fitting = bisect.bisect_left(lengths, True, key=lambda length: not self._fits(start, length))
        if num_fitting:
            return lengths[num_fitting - 1]
        is_first = self._size.num_seqs == self._num_decodes
        filling = (size - taken for size in sizes if size - taken >= LEAST_CHUNK)
        return min(wanted, next(filling, LEAST_CHUNK)) if is_first else 0

    def _in_a_graph(self, start: int, wanted: int) -> int:
        """As many of the tokens as the largest graph has room for, unless there is no graph or a step launched op by op
        is known to keep the limit: such a launch may take the host longer than the step takes the device."""
        assert self._limit_s is not None
        padding, size = self._config.padding, self._size
        largest = padding.largest(self._num_decodes)
        num_prompts = size.num_seqs - self._num_decodes + 1
        if not largest or not padding.takes(num_prompts, start + wanted):
            return wanted
        launch_s = self._step_time.launch_s
        return wanted if launch_s and launch_s <= self._limit_s else min(wanted, largest - size.num_prompt_tokens)

    def _fits(self, start: int, length: int) -> bool:
        assert self._limit_s is not None
        expected_s = self._step_time.predict(self.with_chunk(start, length))
        return expected_s is not None and expected_s <= self._limit_s
