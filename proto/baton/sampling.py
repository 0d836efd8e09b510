"""What a request asks of the sampler, and how a sample can end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import InvalidRequest

MAX_LOGPROBS = 20
"""As in OpenAI's API."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
"""Entries; OpenAI's API takes 300."""
MAX_CACHE_SALT_CHARS = 256


class FinishReason(enum.Enum):
    """Why a sample ended by itself. A stop *string* is found by the router, which reports it as STOP too."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Names, ranges and defaults are vLLM's; `seed`, `max_tokens` are always set between nodes.

    The random draw for a token is a function of (`seed` + sample index, position) alone, so any node can take over at
    any position and draw the same token. `num_logprobs`: -1 none, 0 the chosen token's, k the k most likely too;
    logprobs are of the raw logits, before penalties and temperature. Raises InvalidRequest, naming the parameter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int = -1

    def __post_init__(self) -> None:
        _check(0.0 <= self.temperature <= 1e6, "temperature", self.temperature, "must be in [0, 1e6], 0 being greedy")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "must be in (0, 1]")
        _check(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or more")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "must be in [0, 1]")
        _check(
            0.0 < self.repetition_penalty <= 1e6, "repetition_penalty", self.repetition_penalty, "must be in (0, 1e6]"
        )
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "must be in [-2, 2]")
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "must be in [-2, 2]")
        _check(0 <= self.seed < 2**64, "seed", self.seed, "must be an unsigned 64-bit number")
        _check(1 <= self.max_tokens < 2**31, "max_tokens", self.max_tokens, "must be 1 or more")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "must be in [0, max_tokens]")
        _check(
            -1 <= self.num_logprobs <= MAX_LOGPROBS, "logprobs", self.num_logprobs, f"must be at most {MAX_LOGPROBS}"
        )
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token in self.stop_token_ids:
            _check(0 <= token < 2**31, "stop_token_ids", token, "must be token ids, 0 or more and below 2**31")
        for token, bias in self.logit_bias.items():
            _check(0 <= token < 2**31, "logit_bias", token, "must have token ids, 0 or more and below 2**31")
            _check(-100.0 <= bias <= 100.0, "logit_bias", bias, "must be in [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


def _check(holds: bool, param: str, value: object, rule: str) -> None:
    if not holds:  # also catches NaN: every comparison with it is false
        raise InvalidRequest(f"{param} {rule}, not {value}", param)


def _check_count(param: str, count: int, most: int) -> None:
    _check(count <= most, param, count, f"must be at most {most} tokens")
