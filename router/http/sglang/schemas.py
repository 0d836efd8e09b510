"""What clients may send: the fields of SGLang's GenerateReqInput and SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema

from baton.errors import InvalidRequest
from baton.priority import MAX_PRIORITY
from baton.sampling import MAX_CACHE_SALT_CHARS, RANGES
from router.http.fields import CONFIG, Name, TextOrObject, Whole, between, is_ids, sampling
from router.http.sampling_fields import CommonSampling, check_logprob_token_ids
from router.http.schemas import StreamOptions
from router.http.sglang.unsupported import IN_GENERATE, IN_SAMPLING
from router.http.unsupported import refuse_unsupported
from router.request_ids import REQUEST_ID, is_usable_request_id
from router.text.generation_request import GenerationRequest
from router.text.models import ServedModel
from router.text.num_logprobs import STREAMED, WHOLE
from router.text.structured_output import structured_output_of

DEFAULT_MAX_TOKENS = 128
"""How long answers are at most if the request does not say, as with SGLang. null: what fits."""
_OUTPUT_ALONE = -1
"""As `logprob_start_len`: no logprobs of the prompt."""
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}
"""Of fields of generations: what they are here."""
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""What an answer must match: the names here, and those in `structured_outputs`."""


def _texts(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _ids(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list) and value and (is_ids(value) or all(isinstance(x, list) and is_ids(x) for x in value)):
        return value
    raise ValueError("must be a list of token ids, or a list of such lists")


def _rids(value: Any) -> Any:
    given = value if isinstance(value, list) else [value]
    if value is None or all(isinstance(rid, str) and is_usable_request_id(rid) for rid in given):
        return value
    raise ValueError(f"must be a string that matches ^{REQUEST_ID}$, or a list of such strings")


def _starts(value: Any) -> Any:
    """Read an integer, a list of integers, or null."""
    given = value if isinstance(value, list) else [value]
    if value is not None and not is_ids(given):
        raise ValueError("must be an integer or a list of integers")
    if value is not None and min(given) < _OUTPUT_ALONE:
        raise ValueError(f"must be {_OUTPUT_ALONE} or more, not {min(given)}")
    return value


def _of_all(value: Any) -> Any:
    """SGLang takes lists with a value for each prompt. Here all prompts of a request are treated alike."""
    if not isinstance(value, list) or not value:
        return value
    if any(other != value[0] for other in value[1:]):
        raise ValueError("must be the same for all prompts of a request")
    return value[0]


def _ids_of_all(value: Any) -> Any:
    return _of_all(value) if isinstance(value, list) and value and not is_ids(value) else value


def _one_or_list(one: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}, {"type": "null"}]})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_START = {"type": "integer", "minimum": _OUTPUT_ALONE}
_RID = {"type": "string", "pattern": f"^{REQUEST_ID}$"}

Texts = Annotated[str | list[str] | None, PlainValidator(_texts), _one_or_list({"type": "string"})]
Ids = Annotated[list[int] | list[list[int]] | None, PlainValidator(_ids), _one_or_list(_IDS)]
Rids = Annotated[str | list[str] | None, PlainValidator(_rids), _one_or_list(_RID)]
Starts = Annotated[int | list[int] | None, PlainValidator(_starts), _one_or_list(_START)]
OfAll = BeforeValidator(_of_all)
IdsOfAll = BeforeValidator(_ids_of_all)


@dataclass(frozen=True, slots=True)
class Scores:
    """Which logprobs are told. `num_top`: of so many likely tokens; `named`: of those that the request names instead.
    `starts[i]`: of prompt i the tokens from here on; -1: none. `with_text`: with the tokens' texts beside their ids."""

    num_top: int
    named: bool
    starts: Sequence[int]
    with_text: bool


class SglangSampling(CommonSampling):
    max_new_tokens: Whole | None = between(0, RANGES["max_tokens"].most)  # 0: the prompt alone
    min_new_tokens: Whole | None = sampling("min_tokens")
    sampling_seed: Whole | None = None
    no_stop_trim: bool | None = None
    json_schema: TextOrObject | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: TextOrObject | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_SAMPLING)
        most = self.max_new_tokens if self.says_max else DEFAULT_MAX_TOKENS
        if self.min_new_tokens and most is not None and self.min_new_tokens > most:
            text = f"`min_new_tokens` must be in [0, max_new_tokens], not {self.min_new_tokens}."
            raise InvalidRequest(text, "min_new_tokens")
        if len(given := self.constraints) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            raise InvalidRequest(f"{names} exclude each other.", given[0])

    @property
    def says_max(self) -> bool:
        return "max_new_tokens" in self.model_fields_set

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is dropped: see CompletionRequest."""
        return self.max_new_tokens == 0

    @property
    def constraints(self) -> list[str]:
        return [name for name in _CONSTRAINTS if getattr(self, name) is not None]

    def sampling(self, **translated: Any) -> dict[str, Any]:
        if given := self.constraints:
            asked = {_CONSTRAINTS[given[0]]: getattr(self, given[0])}
            translated["structured_outputs"] = structured_output_of(None, asked, {})
        return super().sampling(
            max_tokens=1 if self.prompt_only else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            **translated,
        )


_DEFAULTS = SglangSampling()


class SglangRequest(BaseModel):
    model_config = CONFIG
    text: Texts = None
    input_ids: Ids = None
    sampling_params: Annotated[SglangSampling | None, OfAll] = None
    rid: Rids = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="accepted, no effect: each event has the usage")
    return_logprob: Annotated[bool | None, OfAll] = None
    logprob_start_len: Starts = None
    top_logprobs_num: Annotated[Whole | None, OfAll] = between(0)
    token_ids_logprob: Annotated[list[Whole] | None, IdsOfAll] = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    cache_salt: Annotated[str | None, OfAll] = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    extra_key: Annotated[str | None, OfAll] = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    priority: Whole | None = between(-MAX_PRIORITY, MAX_PRIORITY)  # higher: served earlier
    timeout: float | None = Field(None, description="seconds until the request is given up")

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_GENERATE)
        self.sampling.check()
        if (self.text is None) is (self.input_ids is None):
            raise InvalidRequest("Either `text` or `input_ids` is needed.", "text")
        for name in ("rid", "logprob_start_len"):
            given = getattr(self, name)
            if isinstance(given, list) and len(given) != self.num_prompts:
                raise InvalidRequest(f"`{name}` has {len(given)} values for {self.num_prompts} prompts.", name)
        if isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise InvalidRequest("`rid` has the same id twice.", "rid")
        if self.cache_salt and self.extra_key:
            raise InvalidRequest("`cache_salt` and `extra_key` exclude each other.", "extra_key")
        if abs(self.priority or 0) > MAX_PRIORITY:
            text = f"`priority` must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {self.priority}."
            raise InvalidRequest(text, "priority")
        if (scores := self.scores) and scores.named and (scores.num_top or max(scores.starts) > _OUTPUT_ALONE):
            text = "`token_ids_logprob` excludes `top_logprobs_num`, and a `logprob_start_len` other than -1."
            raise InvalidRequest(text, "token_ids_logprob")

    def check_logprobs(self, model: ServedModel) -> None:
        """Raises InvalidRequest if the model tells fewer."""
        check_logprob_token_ids(self.token_ids_logprob, model, "token_ids_logprob")
        if (asked := self.top_logprobs_num) is not None and not 0 <= asked <= model.max_logprobs:
            text = f"`top_logprobs_num` must be in [0, {model.max_logprobs}], not {asked}."
            raise InvalidRequest(text, "top_logprobs_num")

    @property
    def sampling(self) -> SglangSampling:
        return self.sampling_params or _DEFAULTS

    @property
    def _has_list(self) -> bool:
        """Whether the prompts are a list, be it of one."""
        if self.text is not None:
            return isinstance(self.text, list)
        return self.input_ids is not None and isinstance(self.input_ids[0], list)

    @property
    def num_prompts(self) -> int:
        return len(self.text or self.input_ids or ()) if self._has_list else 1

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        given: Sequence[Any] = [self.input_ids if self.text is None else self.text]
        return tuple(one if isinstance(one, str) else tuple(one) for one in (given[0] if self._has_list else given))

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, as it is for several samples."""
        return self._has_list or self.num_samples > 1

    @property
    def num_samples(self) -> int:
        """Of each prompt."""
        return 1 if self.sampling.n is None else self.sampling.n

    @property
    def scores(self) -> Scores | None:
        """None: there are no logprobs, whatever the other fields say of them."""
        if not self.return_logprob:
            return None
        start = _OUTPUT_ALONE if self.logprob_start_len is None else self.logprob_start_len
        starts = start if isinstance(start, list) else [start] * self.num_prompts
        named = bool(self.token_ids_logprob)
        return Scores(self.top_logprobs_num or 0, named, starts, bool(self.return_text_in_logprobs))

    @property
    def names(self) -> dict[str, str]:
        """Of fields of generations: what they are here."""
        return {**_NAMES, "prompt": "input_ids" if self.text is None else "text"}

    def constraint(self) -> str | None:
        """The field that says what answers must match."""
        return next(iter(self.sampling.constraints), None)

    @property
    def request_id(self) -> str | None:
        """Of the request as a whole."""
        if isinstance(self.rid, list):
            return self.rid[0] if len(self.rid) == 1 else None
        return self.rid

    def answer_ids(self, request_id: str) -> list[str]:
        """The `id` of each answer, in their order."""
        if not self.is_batch:
            return [request_id]
        if isinstance(self.rid, list) and self.num_samples == 1:
            return self.rid
        return [f"{request_id}_{i}" for i in range(self.num_prompts * self.num_samples)]

    def wanted(self, request_id: str) -> GenerationRequest:
        said, scores = self.sampling, self.scores
        scored: dict[str, Any] = {}
        if scores:
            of_prompt = scores.num_top if max(scores.starts) > _OUTPUT_ALONE else None
            named = self.token_ids_logprob or None
            scored = {"num_logprobs": scores.num_top, "num_prompt_logprobs": of_prompt, "logprob_token_ids": named}
        return GenerationRequest(
            request_id=request_id,
            prompts=self.prompts,
            n=self.num_samples,
            sampling=said.sampling(**scored),
            stop=said.stop,
            include_stop_str_in_output=bool(said.no_stop_trim),
            skip_special_tokens=said.skip_special_tokens is not False,
            spaces_between_special_tokens=said.spaces_between_special_tokens is not False,
            prompt_only=said.prompt_only,
            logprob_limits=STREAMED if self.stream else WHOLE,
            timeout_s=self.timeout,
            cache_salt=self.cache_salt or self.extra_key or "",
            priority=-(self.priority or 0),
            default_max_tokens=None if said.says_max else DEFAULT_MAX_TOKENS,
        )
