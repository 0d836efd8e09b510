"""What a client asks for, through either front end, and its translation into the nodes' parameters."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidRequest
from baton.node_info import GenerationDefaults
from baton.priority import check_priority
from baton.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    NAMES,
    SamplingParams,
)
from baton.structured_output.constraint import StructuredOutput
from router.limits import MAX_COUNTED_CHARS, MAX_N, MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.text.bad_words import check_bad_words
from router.text.models import ServedModel
from router.text.num_logprobs import WHOLE, LogprobLimits, num_prompt_logprobs, num_sample_logprobs
from router.text.tokenizer import TruncationSide, truncated

SEED_SPACE = 2**64
_DRAWN_SEED_BITS = 63
_INT32_END = 2**31
_ALL_THAT_FIT = -1
"""As `truncate_prompt_tokens`: what max_tokens leaves of the context."""
_PROBE_CHARS_PER_TOKEN = 8
"""Twice what common text has. Of a longer text, the beginning is tokenized first."""


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context together."""


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A generation as the client wants it. Nobody changes it.

    Each of `prompts` (text or token ids) gets `n` answers. `sampling`: what the client says of SamplingParams, by name.
    The rest takes the model's generation defaults, or follows from the context. `default_max_tokens`: what a request
    without `max_tokens` gets at most. `prompt_only`: the answers are dropped. `definitions`: what else must compile, as
    the named tools define it, even where answers need not match it.
    """

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool = True
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "left"
    prompt_only: bool = False
    logprob_limits: LogprobLimits = WHOLE
    timeout_s: float | None = None
    cache_salt: str = ""
    priority: int = 0
    default_max_tokens: int | None = None
    definitions: Sequence[tuple[str, StructuredOutput]] = ()

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the parameter."""
        if not self.prompts:
            raise InvalidRequest("there is no prompt", "prompt")
        if not 1 <= self.n <= MAX_N:
            raise InvalidRequest(f"n must be in [1, {MAX_N}], not {self.n}", "n")
        width = self.sampling.get("beam_width", 0)
        if width and self.n > width:
            raise InvalidRequest(f"n must be at most the width of the beam search, {width}, not {self.n}", "n")
        if width and self.stop:
            raise InvalidRequest("stop is not supported in a beam search", "stop")
        if self.stop:
            _check_stop(self.stop)
        for param, most, what in _MOST_OF_SAMPLING:
            if given := self.sampling.get(param):
                _at_most(most, len(given), param, what)
        _at_most(MAX_CACHE_SALT_CHARS, len(self.cache_salt), "cache_salt", "characters")
        if self.bad_words:
            check_bad_words(self.bad_words)
        check_priority(self.priority)
        kept = self.truncate_prompt_tokens
        if kept is not None and kept != _ALL_THAT_FIT and kept < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1, or 1 or more, not {kept}", "truncate_prompt_tokens"
            )
        ends = self.sampling.get("stop_token_ids")
        if ends and not (min(ends) >= 0 and max(ends) < _INT32_END):
            raise InvalidRequest("stop_token_ids must be token ids, 0 or more", "stop_token_ids")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise InvalidRequest(f"the timeout must be above 0 seconds, not {self.timeout_s}", "timeout")


def _check_stop(stop: tuple[str, ...]) -> None:
    if "" in stop:
        raise InvalidRequest("stop must not contain an empty string", "stop")
    _at_most(MAX_STOP_STRINGS, len(stop), "stop", "strings")
    _at_most(MAX_STOP_CHARS, sum(map(len, stop)), "stop", "characters together")


_MOST_OF_SAMPLING = (
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids"),
    ("logit_bias", MAX_LOGIT_BIAS, "entries"),
    ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, "ids"),
)


def _at_most(limit: int, count: int, param: str, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{param} must have at most {limit} {what}, not {count}", param)


def encode(
    text: str,
    model: ServedModel,
    add_special_tokens: bool,
    free_chars: int = 0,
    most: int | None = None,
    truncation_side: TruncationSide = "left",
) -> tuple[int, ...]:
    """Token ids of a text, of a longer one `most`: see `Tokenizer.encode`. If the text is far too long, and longer
    than `free_chars`, raises ContextTooLong without tokenizing all of it.

    The number of characters does not tell how few tokens a text may have: a tokenizer may drop characters, and
    thousands of blanks may be one token. But a tokenizer works from left to right, so the beginning of a text has
    nearly as many tokens alone as within the whole; the difference has never come near half of the context's length.
    """
    beginning = text[: max(free_chars, _PROBE_CHARS_PER_TOKEN * model.max_model_len)]
    if len(beginning) < len(text):
        num_tokens = model.tokenizer.count(beginning)
        if num_tokens > model.max_model_len + model.max_model_len // 2:
            raise _too_long(model, f"more than {num_tokens}")
    return model.tokenizer.encode(text, add_special_tokens, most, truncation_side)


def num_kept_tokens(wanted: GenerationRequest, model: ServedModel) -> int | None:
    """How many tokens are left of a longer prompt; None: all. Raises InvalidRequest for more than the context has."""
    kept = wanted.truncate_prompt_tokens
    if kept == _ALL_THAT_FIT:
        return max(1, model.max_model_len - (wanted.sampling.get("max_tokens") or wanted.default_max_tokens or 1))
    if kept is not None and kept > model.max_model_len:
        text = f"truncate_prompt_tokens must be at most {model.max_model_len}, the model's context, not {kept}"
        raise InvalidRequest(text, "truncate_prompt_tokens")
    return kept


def prompt_tokens(
    prompt: str | tuple[int, ...], wanted: GenerationRequest, model: ServedModel, most: int | None
) -> tuple[int, ...]:
    """The token ids of a prompt of `wanted`, checked; `most`: see `num_kept_tokens`. A text keeps the special tokens
    around it. Raises InvalidRequest."""
    special, side = wanted.add_special_tokens, wanted.truncation_side
    if isinstance(prompt, str):
        tokens = encode(prompt, model, special, 0 if most is None else MAX_COUNTED_CHARS, most, side)
    else:
        tokens = prompt if most is None else truncated(prompt, most, side)
    _check_prompt(tokens, model)
    return tokens


def _check_prompt(prompt: tuple[int, ...], model: ServedModel) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for a token, or that has ids unknown to the model."""
    if not prompt:
        raise InvalidRequest("The prompt is empty: at least one token is needed.", "prompt")
    if len(prompt) >= model.max_model_len:
        raise _too_long(model, str(len(prompt)))
    _check_tokens(prompt, model, "prompt")


def check_answer(tokens: Sequence[int], model: ServedModel) -> None:
    """Raises InvalidRequest for tokens that the model cannot turn into text: too many, or unknown ids."""
    check_num_tokens(len(tokens), model, "tokens")
    _check_tokens(tokens, model, "tokens")


def check_num_tokens(num_tokens: int, model: ServedModel, param: str) -> None:
    """Raises ContextTooLong for more tokens than the context has."""
    if num_tokens > model.max_model_len:
        raise _too_long(model, str(num_tokens), param)


def _check_tokens(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises InvalidRequest for ids that are unknown to the model."""
    if tokens and (min(tokens) < 0 or max(tokens) >= model.vocab_size):
        bad = next(token for token in tokens if not 0 <= token < model.vocab_size)
        raise InvalidRequest(f"Token id {bad} is out of vocabulary, which has {model.vocab_size} tokens.", param)


def _too_long(model: ServedModel, num_tokens: str, param: str = "prompt") -> ContextTooLong:
    """The wording is vLLM's, because clients search for it."""
    return ContextTooLong(
        f"This model's maximum context length is {model.max_model_len} tokens. However, your request has "
        f"{num_tokens} input tokens. Please reduce the length of the input messages.",
        param,
    )


def sampling_params(
    wanted: GenerationRequest,
    model: ServedModel,
    num_prompt_tokens: int,
    bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """What the client says, else what the model does, else what everybody does; with seed and max_tokens resolved.
    Raises InvalidRequest, naming the parameter."""
    beam_search = bool(wanted.sampling.get("beam_width"))
    given = ({} if beam_search else _stated(model.defaults)) | dict(wanted.sampling)
    if beam_search:
        given.setdefault("temperature", 0.0)  # the others do not matter, or change logits
        if 2 * given["beam_width"] > model.vocab_size:
            raise InvalidRequest(f"beam_width must be at most {model.vocab_size // 2}", "beam_width")
    given["logit_bias"] = dict(given.get("logit_bias", {}))
    given["stop_token_ids"] = frozenset(given.get("stop_token_ids", ()))
    given["allowed_token_ids"] = frozenset(given.get("allowed_token_ids", ()))
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        token_ids = given[name]
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
            bad = next(token for token in token_ids if not 0 <= token < model.vocab_size)
            raise InvalidRequest(f"{name} names a token id outside [0, {model.vocab_size}): {bad}", name)
    if "logprob_token_ids" in given:
        named = given["logprob_token_ids"] = tuple(dict.fromkeys(given["logprob_token_ids"]))
        _check_tokens(named, model, "logprob_token_ids")
        given["num_logprobs"] = len(named)
    for name, count_of in (("num_logprobs", num_sample_logprobs), ("num_prompt_logprobs", num_prompt_logprobs)):
        if name in given:
            given[name] = count_of(given[name], model)
    given["bad_words_token_ids"] = bad_words_token_ids
    if given.get("top_k") == -1:  # vLLM's older way to say off
        given["top_k"] = 0
    given["seed"] = _seed(given.get("seed"))
    given["max_tokens"] = _max_tokens(given.get("max_tokens"), wanted.default_max_tokens, model, num_prompt_tokens)
    params = SamplingParams(**given)
    _check_may_begin(params, model)
    return params


def check_answer_logprobs(params: Sequence[SamplingParams], wanted: GenerationRequest) -> None:
    """Raises InvalidRequest if the answers would have too many logprobs. params: of each prompt with more logprobs of
    each token than there are by default."""
    at_once = in_all = 0
    for of_prompt in params:
        num_each, width = 1 + of_prompt.num_logprobs, of_prompt.beam_width
        at_once = max(at_once, num_each * (of_prompt.max_tokens if width else 1))
        in_all += max(wanted.n, width) * num_each * of_prompt.max_tokens
    limits = wanted.logprob_limits
    for count, most, where in ((at_once, limits.at_once, "one event"), (in_all, limits.of_answers, "all answers")):
        if count > most:
            text = f"logprobs may give at most {most} in {where} here, not {count}"
            raise InvalidRequest(f"{text}: n, max_tokens or logprobs must be lower", "logprobs")


def _seed(asked: int | None) -> int:
    """-1 draws one, as in vLLM; so do the other numbers that are equal to it modulo 2^64, since gRPC has only these."""
    seed = None if asked is None else asked % SEED_SPACE
    return random.getrandbits(_DRAWN_SEED_BITS) if seed in (None, -1 % SEED_SPACE) else seed


@functools.lru_cache(maxsize=64)
def _stated(defaults: GenerationDefaults) -> dict[str, Any]:
    """What a model says of SamplingParams, by name. Not to be changed."""
    said = {name: getattr(defaults, name, None) for name in NAMES}
    return {name: value for name, value in said.items() if value is not None}


def _check_may_begin(params: SamplingParams, model: ServedModel) -> None:
    """Raises InvalidRequest if min_tokens forbids all allowed tokens."""
    ends = params.stop_token_ids.union(() if params.ignore_eos else model.defaults.eos_token_ids)
    if params.min_tokens and params.allowed_token_ids and params.allowed_token_ids <= ends:
        text = f"min_tokens {params.min_tokens} forbids all of allowed_token_ids: each of them ends the answer"
        raise InvalidRequest(text, "min_tokens")


def _max_tokens(asked: int | None, default: int | None, model: ServedModel, num_prompt_tokens: int) -> int:
    room = model.max_model_len - num_prompt_tokens
    if asked is None:
        return min(room, default or room, model.defaults.max_new_tokens or room)
    if asked > room:
        raise ContextTooLong(
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context "
            f"length is {model.max_model_len} tokens and your request has {num_prompt_tokens} input tokens "
            f"({asked} > {model.max_model_len} - {num_prompt_tokens}).",
            "max_tokens",
        )
    return asked
