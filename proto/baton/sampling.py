"""Sampling parameters, and the reasons why a sample ends."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from baton.errors import InvalidRequest
from baton.logits_processors import MAX_LOGITS_PROCESSORS, LogitsProcessor
from baton.structured_output.constraint import StructuredOutput

DEFAULT_MAX_LOGPROBS = 20
"""Of a model whose nodes do not say otherwise (--max-logprobs). As in OpenAI's API."""
MAX_BEAM_WIDTH = 10
"""Each beam's step reports the logprobs of twice as many tokens, whatever --max-logprobs is."""
MAX_INT32 = 2**31 - 1
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
"""Number of entries; OpenAI's API allows 300."""
MAX_BIAS = 100
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 512
"""Token sequences; a word has up to two."""
MAX_BAD_WORD_TOKENS = 4096
"""Of all bad words together."""
MAX_CACHE_SALT_CHARS = 256

N = TypeVar("N", int, float)


class FinishReason(enum.Enum):
    """Why a sample ended by itself. A stop *string* is found by the router, which reports it as STOP too."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `least` to `most`, excluding `least` if `excludes_least`. `text` describes them in errors."""

    least: float
    most: float
    text: str
    excludes_least: bool = False

    def __contains__(self, value: float) -> bool:  # False for NaN, as all its comparisons are
        return (self.least < value if self.excludes_least else self.least <= value) and value <= self.most


def _within(default: N, least: float, most: float, text: str, *, excludes_least: bool = False) -> N:
    """A numeric field with a valid range."""
    declared: Any = field(default=default, metadata={"range": Range(least, most, text, excludes_least)})
    number: N = declared
    return number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Names, ranges and defaults are vLLM's; `seed`, `max_tokens` are always set between nodes.

    This is where a parameter is declared, with its type, default and range. Fields of the same name carry it between
    processes (`v1/common.proto`) and from clients (`v1/generation.proto` and `router/http/schemas.py`); readers,
    writers and the API's description are derived from the names.

    The random draw for a token is a function of (`seed` + sample index, position) alone, so any node can take over at
    any position and draw the same token. `num_logprobs`: -1: none; 0: the chosen token's; k: also the k most likely;
    logprobs are of the raw logits, before penalties and temperature. The model limits k (--max-logprobs of its nodes),
    here and in `num_prompt_logprobs`: whoever knows the model checks it. `logprob_token_ids`: tokens whose logprobs
    come, in this order, instead of those of the most likely ones; `num_logprobs` is their number. `allowed_token_ids`:
    no other token is chosen; empty: all are allowed. `bad_words_token_ids`: no token completes one of these in the
    output, unless the allowed tokens leave no other. `logits_processors`: those of installed packages that change the
    raw logits. `beam_width`: beam search with so many beams, of which the best become the answers. Raises
    InvalidRequest that names the parameter.
    """

    temperature: float = _within(1.0, 0.0, 1e6, "must be in [0, 1e6], 0 being greedy")
    top_p: float = _within(1.0, 0.0, 1.0, "must be in (0, 1]", excludes_least=True)
    top_k: int = _within(0, 0, 2**31 - 1, "must be 0 (off) or more, and below 2^31")
    min_p: float = _within(0.0, 0.0, 1.0, "must be in [0, 1]")
    repetition_penalty: float = _within(1.0, 0.0, 1e6, "must be in (0, 1e6]", excludes_least=True)
    presence_penalty: float = _within(0.0, -2.0, 2.0, "must be in [-2, 2]")
    frequency_penalty: float = _within(0.0, -2.0, 2.0, "must be in [-2, 2]")
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = _within(0, 0, 2**64 - 1, "must be an unsigned 64-bit number")
    max_tokens: int = _within(16, 1, 2**31 - 1, "must be 1 or more, and below 2^31")
    min_tokens: int = _within(0, 0, 2**31 - 1, "must be in [0, max_tokens]")
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int = _within(-1, -1, MAX_INT32, "must be -1 (none) or more, and below 2^31")
    logprob_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    structured_outputs: StructuredOutput | None = None
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    beam_width: int = _within(0, 0, MAX_BEAM_WIDTH, f"must be 0 (no beam search) or at most {MAX_BEAM_WIDTH}")
    length_penalty: float = _within(1.0, -10.0, 10.0, "must be in [-10, 10]")

    def __post_init__(self) -> None:
        for name, default, valid in _RANGED:
            value = getattr(self, name)
            if value != default and value not in valid:  # defaults are in range, and most parameters have theirs
                _check(False, "logprobs" if name == "num_logprobs" else name, value, valid.text)
        prompt = self.num_prompt_logprobs
        in_range = prompt is None or 0 <= prompt <= MAX_INT32
        _check(in_range, "prompt_logprobs", prompt, "must be 0 or more, and below 2^31")
        _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, RANGES["min_tokens"].text)
        if self.stop_token_ids:
            _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
            _check_tokens("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids:
            _check_count("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
            _check_tokens("allowed_token_ids", self.allowed_token_ids)
        if self.bad_words_token_ids:
            self._check_bad_words()
        if self.beam_width:
            self._check_beam_search()
        elif self.length_penalty != 1.0:
            _check(False, "length_penalty", self.length_penalty, "needs use_beam_search")
        if (count := len(self.logits_processors)) > MAX_LOGITS_PROCESSORS:
            _check(False, "logits_processors", count, f"must be at most {MAX_LOGITS_PROCESSORS}")
        if self.logit_bias:
            self._check_logit_bias()
        if self.logprob_token_ids:
            self._check_logprob_tokens()

    def _check_logprob_tokens(self) -> None:
        name, count = "logprob_token_ids", len(self.logprob_token_ids)
        _check_tokens(name, self.logprob_token_ids)
        _check(count == self.num_logprobs, name, count, f"must be num_logprobs, {self.num_logprobs} tokens")
        if self.beam_width:
            raise InvalidRequest(f"{name} and a beam search exclude each other", name)

    def _check_logit_bias(self) -> None:
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            _check(0 <= token < 2**31, "logit_bias", token, "must have token ids, 0 or more and below 2**31")
            _check(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", bias, f"must be in [-{MAX_BIAS}, {MAX_BIAS}]")

    def _check_bad_words(self) -> None:
        words = self.bad_words_token_ids
        _check(len(words) <= MAX_BAD_WORDS, "bad_words", len(words), f"must be at most {MAX_BAD_WORDS} token sequences")
        _check_count("bad_words", sum(map(len, words)), MAX_BAD_WORD_TOKENS)
        for word in words:
            _check(bool(word), "bad_words", word, "must have tokens")
            _check_tokens("bad_words", word)

    def _check_beam_search(self) -> None:
        """Beams are compared by the raw logits, so what changes these is refused."""
        _check(self.greedy, "temperature", self.temperature, "must be 0 in a beam search")
        _check(not self.min_tokens, "min_tokens", self.min_tokens, "must be 0 in a beam search")
        changes = {
            "repetition_penalty": self.repetition_penalty != 1.0,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words_token_ids,
            "structured_outputs": self.structured_outputs,
            "logits_processors": self.logits_processors,
        }
        for name, value in changes.items():
            if value:
                raise InvalidRequest(f"{name} changes logits, which a beam search does not support", name)
        if self.num_prompt_logprobs is not None:  # no one node computes the logits of all of the prompt
            raise InvalidRequest("prompt_logprobs and a beam search exclude each other", "prompt_logprobs")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often there have been which tokens."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def depends_on_output(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        several = any(len(word) > 1 for word in self.bad_words_token_ids)
        return self.has_penalties or several or bool(self.logits_processors)


NAMES = tuple(parameter.name for parameter in fields(SamplingParams))
RANGES: dict[str, Range] = {p.name: p.metadata["range"] for p in fields(SamplingParams) if "range" in p.metadata}
_RANGED = [(p.name, p.default, RANGES[p.name]) for p in fields(SamplingParams) if p.name in RANGES]


def _check(holds: bool, param: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}, not {value}", param)


def _check_tokens(param: str, tokens: Collection[int]) -> None:
    for token in (min(tokens), max(tokens)):
        _check(0 <= token < 2**31, param, token, "must be token ids, 0 or more and below 2**31")


def _check_count(param: str, count: int, most: int) -> None:
    _check(count <= most, param, count, f"must be at most {most} tokens")
