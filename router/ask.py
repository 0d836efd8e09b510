"""What a client asks for, whichever front end it came through, and its translation into the nodes' words."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from router.models import ServedModel

MAX_N = 128
"""As in OpenAI's API."""
MAX_PROMPTS = 2048
"""In one request, as in OpenAI's API."""
SEED_SPACE = 2**64
_DRAWN_SEED_BITS = 63
_INT32_END = 2**31

T = TypeVar("T")


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A generation as the client wants it. None takes the model's generation default, or what follows from the context.

    Each of `prompts` (text or token ids) gets `n` answers. `num_logprobs` as in SamplingParams.
    """

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool = True
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the parameter."""
        if not self.prompts:
            raise InvalidRequest("there is no prompt", "prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"there must be at most {MAX_PROMPTS} prompts, not {len(self.prompts)}", "prompt")
        if not 1 <= self.n <= MAX_N:
            raise InvalidRequest(f"n must be in [1, {MAX_N}], not {self.n}", "n")
        if "" in self.stop:
            raise InvalidRequest("stop must not contain an empty string", "stop")
        if any(not 0 <= token < _INT32_END for token in self.stop_token_ids):
            raise InvalidRequest("stop_token_ids must be token ids, 0 or more", "stop_token_ids")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise InvalidRequest(f"the timeout must be above 0 seconds, not {self.timeout_s}", "timeout")


def check_prompt(prompt: tuple[int, ...], model: ServedModel) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for a token, or with ids that the model does not have.

    The wording is vLLM's, which clients know to look for.
    """
    if not prompt:
        raise InvalidRequest("The prompt is empty: at least one token is needed.", "prompt")
    if len(prompt) >= model.max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your request has "
            f"{len(prompt)} input tokens. Please reduce the length of the input messages.",
            "prompt",
        )
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        bad = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise InvalidRequest(f"Token id {bad} is out of vocabulary, which has {model.vocab_size} tokens.", "prompt")


def sampling_params(ask: Ask, model: ServedModel, num_prompt_tokens: int) -> SamplingParams:
    """With seed and max_tokens resolved. Raises InvalidRequest, naming the parameter."""
    defaults = model.defaults
    if any(not 0 <= token < model.vocab_size for token in ask.logit_bias):
        raise InvalidRequest(f"logit_bias names a token id outside [0, {model.vocab_size})", "logit_bias")
    top_k = _first(ask.top_k, defaults.top_k, 0)
    if top_k >= _INT32_END:
        raise InvalidRequest(f"top_k must be below 2^31, not {top_k}", "top_k")
    seed = random.getrandbits(_DRAWN_SEED_BITS) if ask.seed is None else ask.seed % SEED_SPACE
    return SamplingParams(
        temperature=_first(ask.temperature, defaults.temperature, 1.0),
        top_p=_first(ask.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k == -1 else top_k,  # vLLM's older way to say off
        min_p=_first(ask.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(ask.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(ask.presence_penalty, None, 0.0),
        frequency_penalty=_first(ask.frequency_penalty, None, 0.0),
        logit_bias=ask.logit_bias,
        seed=seed,
        max_tokens=_max_tokens(ask, model, num_prompt_tokens),
        min_tokens=ask.min_tokens,
        ignore_eos=ask.ignore_eos,
        stop_token_ids=frozenset(ask.stop_token_ids),
        num_logprobs=ask.num_logprobs,
    )


def _max_tokens(ask: Ask, model: ServedModel, num_prompt_tokens: int) -> int:
    room = model.max_model_len - num_prompt_tokens
    if ask.max_tokens is None:
        return min(room, model.defaults.max_new_tokens or room)
    if ask.max_tokens > room:
        raise ContextTooLong(
            f"'max_tokens' or 'max_completion_tokens' is too large: {ask.max_tokens}. This model's maximum context "
            f"length is {model.max_model_len} tokens and your request has {num_prompt_tokens} input tokens "
            f"({ask.max_tokens} > {model.max_model_len} - {num_prompt_tokens}).",
            "max_tokens",
        )
    return ask.max_tokens


def _first(given: T | None, default: T | None, otherwise: T) -> T:
    """What the client gave, else what the model says, else what everybody does."""
    if given is not None:
        return given
    return otherwise if default is None else default
