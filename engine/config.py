"""The settings of an engine, fixed at its start."""

from __future__ import annotations

from dataclasses import dataclass

from baton.layout import num_blocks_for
from baton.sampling import DEFAULT_MAX_LOGPROBS
from baton.table_shape import NO_WINDOW, TableShape
from engine.step_padding import UNPADDED, StepPadding

MIN_MODEL_LEN = 2
"""A token of a prompt, and one that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine. Raises ValueError, naming the flag, when they cannot work together.

    `num_blocks` is the length of the pool tensor and includes the null block 0. `max_num_batched_tokens` bounds the
    prompt tokens of a step; the tokens of decodes come on top. `max_num_seqs` bounds the running sequences, and
    how many tokens a step chooses for all samples of several prompts (`engine.prompt_budget`).
    `async_scheduling`: launch a step before the previous one has retired, for a runner that computes on a device of its
    own. `num_stages`: the pipeline stages of the runner, each of which computes another step at the same time; the
    engine launches as many steps before the oldest has retired. `saturating_num_tokens`: a step with this many prompt
    tokens takes no further prompt, since it keeps the device busy and another prompt would only delay the first tokens
    of the others; the budget above is for chunks of long prompts, whose attention gains from it (idea from DistServe,
    section 4.3). None: only the budget bounds a step. `target_itl_s`: the most time that a step with decodes should
    take; its prompts get chunks for which that is predicted, see `engine.prompt_budget`. None: only the budget bounds
    it. `padding`: to how many tokens the device pads a step with prompts and decodes. `num_speculative_tokens`: the
    most draft tokens of a sequence that a step verifies. `max_logprobs`: the most logprobs of likely tokens that a
    request may ask for, per token. `windows`: of each KV group of the model's layers, see
    `baton.table_shape`.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    async_scheduling: bool = False
    num_stages: int = 1
    saturating_num_tokens: int | None = None
    num_speculative_tokens: int = 0
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    target_itl_s: float | None = None
    padding: StepPadding = UNPADDED
    windows: tuple[int | None, ...] = NO_WINDOW

    def __post_init__(self) -> None:
        _check(self.block_size >= 1, "block-size", self.block_size, "must be 1 or more")
        _check(
            self.max_model_len >= MIN_MODEL_LEN, "max-model-len", self.max_model_len, f"must be {MIN_MODEL_LEN} or more"
        )
        _check(self.max_num_seqs >= 1, "max-num-seqs", self.max_num_seqs, "must be 1 or more")
        _check(
            self.max_num_batched_tokens >= 1, "max-num-batched-tokens", self.max_num_batched_tokens, "must be 1 or more"
        )
        assert self.num_speculative_tokens >= 0
        _check(self.vocab_size >= 1, "model", self.vocab_size, "must have a vocabulary of 1 or more tokens")
        needed = self.most_blocks(self.max_model_len)
        _check(
            self.num_blocks - 1 >= needed,
            "num-gpu-blocks-override",
            self.num_blocks - 1,
            f"must be at least {needed}: one request of --max-model-len {self.max_model_len} fills so many blocks of "
            f"{self.block_size} tokens (give the pool more memory, or lower --max-model-len)",
        )

    @property
    def table_shape(self) -> TableShape:
        return TableShape(self.block_size, self.windows)

    @property
    def num_steps_ahead(self) -> int:
        """The most steps that are in flight when one more is launched."""
        return max(1, self.num_stages - 1) if self.async_scheduling else 0

    @property
    def num_in_flight_tokens(self) -> int:
        """The most tokens of a sequence that the launched steps and the next one compute."""
        return (1 + self.num_steps_ahead) * max(self.max_num_batched_tokens, 1 + self.num_speculative_tokens)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens needs at a time."""
        if self.windows == NO_WINDOW:
            return num_blocks_for(num_tokens, self.block_size)
        shape = self.table_shape
        return shape.most_held(shape.num_columns(num_tokens), self.num_in_flight_tokens)


def _check(holds: bool, flag: str, value: int, rule: str) -> None:
    if not holds:
        raise ValueError(f"--{flag} {rule}, not {value}")
