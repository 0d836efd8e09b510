"""How a prompt is answered: vLLM's `SamplingParams`, checked when it is made."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self

import baton.sampling
from baton.errors import InvalidRequest
from baton.logits_processors import LogitsProcessor
from baton.node_info import GenerationDefaults
from baton.sampling import NAMES
from router.text.generation_request import SEED_SPACE, GenerationRequest
from router.text.num_logprobs import ALL
from router.text.structured_output import structured_output_of

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)
_WHOLE = ("n", "top_k", "min_tokens", "beam_width")
_WHOLE_OR_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_PROCESSORS = "a list of names, or of dicts with `name`, `args` and `kwargs`"


class RequestOutputKind(enum.Enum):
    """What the outputs of an `AsyncLLM` have: all that there is so far, what is new since the one before, or all of it
    once, at the end. `LLM` returns finished outputs in any case."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer must match: exactly one of these. json: a JSON schema, as a dict or as text. choice: the texts of
    which it is one. grammar: in the notation of the nodes' backend. json_object: any JSON object. structural_tag: as
    with `response_format` over HTTP, as a dict or as text. Raises InvalidRequest."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if structured_output_of(None, vars(self), {}) is None:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            raise InvalidRequest(f"StructuredOutputsParams needs one of {names}", "structured_outputs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names and defaults are vLLM's; `baton.sampling` has the ranges.

    n: answers to each prompt. seed: None and -1 draw one; the same seed gives the same answers. max_tokens: None is
    what the context leaves. logprobs: None for none, 0 for those of the chosen tokens, k for the k most likely too, -1
    for those of the whole vocabulary; the nodes' `max_logprobs` limits it. logprob_token_ids: logprobs of these tokens,
    instead of the most likely ones'. stop: texts that end an answer, of which they are no part unless
    `include_stop_str_in_output`. detokenize: False leaves texts out of the outputs. structured_outputs: what an answer
    must match, or a dict with one of its names. allowed_token_ids: no other token is chosen. bad_words: no token
    completes one of these. prompt_logprobs: logprobs of the prompt's tokens, each with so many of the most likely ones,
    limited as `logprobs` is. logits_processors: names of installed ones, or dicts with `name`, `args` and `kwargs`.
    beam_width, length_penalty: see `BeamSearchParams`. output_kind: of an `AsyncLLM`. Raises InvalidRequest, whose
    `param` is the name of the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logits_processors: Sequence[str | Mapping[str, Any]] | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_types()
        request_of(self, "", ())  # checks n, stop and bad_words
        ranged = {**self.sampling(), **{name: frozenset(getattr(self, name) or ()) for name in _TOKEN_LISTS}}
        ranged["seed"] = ranged.get("seed", 0) % SEED_SPACE
        ranged["top_k"] = max(0, self.top_k) if self.top_k == -1 else self.top_k  # -1: vLLM's older way to say off
        for name in {"num_logprobs", "num_prompt_logprobs"} & ranged.keys():
            ranged[name] = max(0, ranged[name])
        ranged.setdefault("max_tokens", max(1, self.min_tokens))
        baton.sampling.SamplingParams(**ranged)

    def clone(self) -> Self:
        """A copy that shares nothing with this one. For one with other values, use `dataclasses.replace`."""
        return copy.deepcopy(self)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> dict[str, Any]:
        """What it says of `baton.sampling.SamplingParams`, by name."""
        said = {name: getattr(self, name) for name in NAMES if hasattr(self, name)}
        said |= {"num_logprobs": self.logprobs, "num_prompt_logprobs": self.prompt_logprobs}
        if self.logprob_token_ids:
            said["num_logprobs"] = len(set(self.logprob_token_ids))
        said["structured_outputs"] = structured_output_of(None, self._structured_outputs, {})
        said["logits_processors"] = tuple(map(_processor, self.logits_processors or ())) or None
        return {name: value for name, value in said.items() if value is not None}

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def _structured_outputs(self) -> Mapping[str, Any] | None:
        stated = self.structured_outputs
        return vars(stated) if isinstance(stated, StructuredOutputsParams) else stated

    def _check_types(self) -> None:
        for name in _NUMBERS:
            _check(_is_number(getattr(self, name)), name, "a number", getattr(self, name))
        for name in _WHOLE:
            _check(_is_whole(getattr(self, name)), name, "a whole number", getattr(self, name))
        for name in _WHOLE_OR_NONE:
            value = getattr(self, name)
            _check(value is None or _is_whole(value), name, "a whole number or None", value)
        for name in _FLAGS:
            _check(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or count >= ALL, name, "0 or more, -1 for all, or None", count)
        self._check_lists()
        stated, biases = self._structured_outputs, self.logit_bias
        wanted = "a StructuredOutputsParams, a dict or None"
        _check(stated is None or isinstance(stated, Mapping), "structured_outputs", wanted, stated)
        kind = self.output_kind
        _check(isinstance(kind, RequestOutputKind), "output_kind", "a RequestOutputKind", kind)
        is_map = isinstance(biases, Mapping) and all(map(_is_whole, biases)) and all(map(_is_number, biases.values()))
        _check(biases is None or is_map, "logit_bias", "a dict of token ids and numbers, or None", biases)

    def _check_lists(self) -> None:
        """Lists are read more than once, so an iterator is none."""
        stop, words = self.stop, self.bad_words
        is_stop = stop is None or is_text(stop) or _is_list(stop, is_text)
        _check(is_stop, "stop", "a text or a list of texts", stop)
        _check(self.detokenize or not stop, "stop", "None with detokenize=False", stop)
        _check(words is None or _is_list(words, is_text), "bad_words", "a list of texts", words)
        for name in _TOKEN_LISTS:
            ids = getattr(self, name)
            _check(ids is None or _is_list(ids, _is_whole), name, "a list of token ids", ids)
        for name in ("allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            _check(ids is None or len(ids) > 0, name, "a list with token ids, or None", ids)
        processors = self.logits_processors
        are_processors = processors is None or _is_list(processors, lambda wanted: isinstance(wanted, str | Mapping))
        _check(are_processors, "logits_processors", _PROCESSORS, processors)


def default_params(defaults: GenerationDefaults) -> SamplingParams:
    """Those of a model, as vLLM has them: what generation_config.json states, else the defaults of the class. Raises
    InvalidRequest for a value out of range."""
    stated = {name: value for name, value in dataclasses.asdict(defaults).items() if value is not None}
    del stated["eos_token_ids"]  # they end answers in any case
    if "max_new_tokens" in stated:
        stated["max_tokens"] = stated.pop("max_new_tokens")
    return SamplingParams(**stated)


def request_of(
    params: SamplingParams | None, request_id: str, prompt: tuple[int, ...], priority: int = 0, cache_salt: str = ""
) -> GenerationRequest:
    """The request for a prompt of these tokens. Without params, all is left to the model's generation defaults."""
    if params is None:
        return GenerationRequest(request_id=request_id, prompts=(prompt,), priority=priority, cache_salt=cache_salt)
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        priority=priority,
        cache_salt=cache_salt,
        n=params.n,
        sampling=params.sampling(),
        stop=tuple(dict.fromkeys(params.stops)),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        bad_words=tuple(params.bad_words or ()),
    )


def _processor(wanted: str | Mapping[str, Any]) -> LogitsProcessor:
    if isinstance(wanted, str):
        return LogitsProcessor(wanted)
    given = dict(wanted)
    name = given.pop("name", None) or given.pop("qualname", None)
    known = isinstance(name, str) and not given.keys() - {"args", "kwargs"}
    known = known and isinstance(given.get("args", []), list) and isinstance(given.get("kwargs", {}), dict)
    _check(known, "logits_processors", _PROCESSORS, wanted)
    return LogitsProcessor.of(str(name), given.get("args"), given.get("kwargs"))


def _check(holds: bool, param: str, kind: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{param} must be {kind}, not {value!r}", param)


def _is_list(value: object, is_item: Callable[[object], bool]) -> bool:
    """Or a tuple or a set."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes) and all(map(is_item, value))


def is_text(value: object) -> bool:
    """Not one with half of a surrogate pair, as bytes become that are no UTF-8: it has no tokens."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
