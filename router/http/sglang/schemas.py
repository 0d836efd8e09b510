"""What clients may send: the fields of SGLang's GenerateReqInput and SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema

from baton.errors import InvalidRequest
from baton.priority import MAX_PRIORITY
from baton.sampling import MAX_CACHE_SALT_CHARS, RANGES
from router.http.fields import CONFIG, Name, TextOrObject, Whole, between, is_ids, sampling
from router.http.sampling_fields import CommonSampling, check_logprob_token_ids
from router.http.schemas import StreamOptions
from router.http.sglang.unsupported import IN_GENERATE, IN_SAMPLING
from router.http.unsupported import refuse_unsupported
from router.limits import MAX_SAMPLING_PARAMS
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
T = TypeVar("T")
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


def _starts(value: list[Any]) -> list[Any]:
    """Check those that `_each` has made a list of."""
    if not is_ids(value):
        raise ValueError("must be an integer or a list of integers")
    if min(value) < _OUTPUT_ALONE:
        raise ValueError(f"must be {_OUTPUT_ALONE} or more, not {min(value)}")
    return value


def _each(value: Any) -> Any:
    """One value is for all prompts of a request; a list has one for each."""
    return value if value is None or isinstance(value, list) else [value]


def _ids_each(value: Any) -> Any:
    return [value] if isinstance(value, list) and (not value or is_ids(value)) else value


def _one_or_list(one: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}, {"type": "null"}]})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_RID = {"type": "string", "pattern": f"^{REQUEST_ID}$"}

Texts = Annotated[str | list[str] | None, PlainValidator(_texts), _one_or_list({"type": "string"})]
Ids = Annotated[list[int] | list[list[int]] | None, PlainValidator(_ids), _one_or_list(_IDS)]
Rids = Annotated[str | list[str] | None, PlainValidator(_rids), _one_or_list(_RID)]
Flags = Annotated[list[bool], Field(min_length=1), BeforeValidator(_each, json_schema_input_type=bool | list[bool])]
Count = Annotated[int, Field(json_schema_extra={"minimum": 0})]
Counts = Annotated[list[Whole], Field(min_length=1), BeforeValidator(_each, json_schema_input_type=Count | list[Count])]
Start = Annotated[int, Field(json_schema_extra={"minimum": _OUTPUT_ALONE})]
Starts = Annotated[
    list[Any], AfterValidator(_starts), BeforeValidator(_each, json_schema_input_type=Start | list[Start])
]
IdLists = Annotated[
    list[list[Whole]],
    Field(min_length=1),
    BeforeValidator(_ids_each, json_schema_input_type=list[int] | list[list[int]]),
]
Salt = Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)]
Salts = Annotated[list[Salt], Field(min_length=1), BeforeValidator(_each, json_schema_input_type=Salt | list[Salt])]


@dataclass(frozen=True, slots=True)
class Scores:
    """Which logprobs are told of a prompt and its answers. `num_top`: of so many likely tokens; `named`: of those
    instead. `start`: of the prompt the tokens from here on; -1: none."""

    num_top: int
    named: Sequence[int]
    start: int


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
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

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
Samplings = Annotated[
    list[SglangSampling],
    Field(min_length=1, max_length=MAX_SAMPLING_PARAMS),
    BeforeValidator(_each, json_schema_input_type=SglangSampling | list[SglangSampling]),
]
_LISTS = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("cache_salt", "extra_key"),
)
"""Fields with a value for all prompts, or one for each."""


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """What is wanted of one prompt. `named_scores`: those that fields name, be they told or not."""

    prompt: str | tuple[int, ...]
    sampling: SglangSampling
    tells_scores: bool
    named_scores: Scores
    cache_salt: str

    @property
    def scores(self) -> Scores | None:
        """None: there are no logprobs."""
        return self.named_scores if self.tells_scores else None

    def check(self, model: ServedModel) -> None:
        """Raises InvalidRequest for contradictions, and if the model tells fewer logprobs."""
        if (scores := self.scores) and scores.named and (scores.num_top or scores.start > _OUTPUT_ALONE):
            text = "`token_ids_logprob` excludes `top_logprobs_num`, and a `logprob_start_len` other than -1."
            raise InvalidRequest(text, "token_ids_logprob")
        check_logprob_token_ids(self.named_scores.named, model, "token_ids_logprob")
        if not 0 <= (asked := self.named_scores.num_top) <= model.max_logprobs:
            text = f"`top_logprobs_num` must be in [0, {model.max_logprobs}], not {asked}."
            raise InvalidRequest(text, "top_logprobs_num")

    def wanted(self, request_id: str, body: SglangRequest) -> GenerationRequest:
        said, scores = self.sampling, self.scores
        scored: dict[str, Any] = {}
        if scores:
            of_prompt = scores.num_top if scores.start > _OUTPUT_ALONE else None
            named = scores.named or None
            scored = {"num_logprobs": scores.num_top, "num_prompt_logprobs": of_prompt, "logprob_token_ids": named}
        return GenerationRequest(
            request_id=request_id,
            prompts=(self.prompt,),
            n=body.num_samples,
            sampling=said.sampling(**scored),
            stop=said.stop,
            include_stop_str_in_output=bool(said.no_stop_trim),
            skip_special_tokens=said.skip_special_tokens is not False,
            spaces_between_special_tokens=said.spaces_between_special_tokens is not False,
            prompt_only=said.prompt_only,
            logprob_limits=STREAMED if body.stream else WHOLE,
            timeout_s=body.timeout,
            cache_salt=self.cache_salt,
            priority=-(body.priority or 0),
            default_max_tokens=None if said.says_max else DEFAULT_MAX_TOKENS,
        )


class SglangRequest(BaseModel):
    model_config = CONFIG
    text: Texts = None
    input_ids: Ids = None
    sampling_params: Samplings | None = None
    rid: Rids = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="accepted, no effect: each event has the usage")
    return_logprob: Flags | None = None
    logprob_start_len: Starts | None = None
    top_logprobs_num: Counts | None = None
    token_ids_logprob: IdLists | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    cache_salt: Salts | None = None
    extra_key: Salts | None = None
    priority: Whole | None = between(-MAX_PRIORITY, MAX_PRIORITY)  # higher: served earlier
    timeout: float | None = Field(None, description="seconds until the request is given up")

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_GENERATE)
        if (self.text is None) is (self.input_ids is None):
            raise InvalidRequest("Either `text` or `input_ids` is needed.", "text")
        for name in ("rid", *_LISTS):
            given = getattr(self, name)
            if isinstance(given, list) and len(given) != self.num_prompts and (name == "rid" or len(given) > 1):
                raise InvalidRequest(f"`{name}` has {len(given)} values for {self.num_prompts} prompts.", name)
        if isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise InvalidRequest("`rid` has the same id twice.", "rid")
        if self.cache_salt and self.extra_key:
            raise InvalidRequest("`cache_salt` and `extra_key` exclude each other.", "extra_key")
        if abs(self.priority or 0) > MAX_PRIORITY:
            text = f"`priority` must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {self.priority}."
            raise InvalidRequest(text, "priority")
        for said in self.sampling_params or ():
            said.check()
            if said.num_samples != self.num_samples:
                raise InvalidRequest("`n` must be the same for all prompts of a request.", "n")

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
    def _prompts(self) -> Sequence[Any]:
        given = (self.input_ids if self.text is None else self.text) or ""
        return given if self._has_list else [given]

    @property
    def sizes(self) -> list[int]:
        """Of the prompts, in characters or tokens."""
        return list(map(len, self._prompts))

    @cached_property
    def each(self) -> list[OnePrompt]:
        salts = self.cache_salt or self.extra_key
        return [
            OnePrompt(
                prompt if isinstance(prompt, str) else tuple(prompt),
                _of(self.sampling_params, index, _DEFAULTS),
                _of(self.return_logprob, index, False),
                self._scores(index),
                _of(salts, index, ""),
            )
            for index, prompt in enumerate(self._prompts)
        ]

    def _scores(self, index: int) -> Scores:
        return Scores(
            _of(self.top_logprobs_num, index, 0),
            _of(self.token_ids_logprob, index, []),
            _of(self.logprob_start_len, index, _OUTPUT_ALONE),
        )

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, as it is for several samples."""
        return self._has_list or self.num_samples > 1

    @property
    def num_samples(self) -> int:
        """Of each prompt."""
        return _of(self.sampling_params, 0, _DEFAULTS).num_samples

    @property
    def names(self) -> dict[str, str]:
        """Of fields of generations: what they are here."""
        return {**_NAMES, "prompt": "input_ids" if self.text is None else "text"}

    def constraint(self) -> str | None:
        """The field that says what answers must match, or all of them together."""
        found = {name for one in self.each for name in one.sampling.constraints}
        return "sampling_params" if len(found) > 1 else next(iter(found), None)

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

    def wanted(self, request_id: str, model: ServedModel) -> list[GenerationRequest]:
        """Of each prompt, once so many are admitted. Raises InvalidRequest."""
        for one in self.each:
            one.check(model)
        return [one.wanted(request_id, self) for one in self.each]


def _of(values: Sequence[T] | None, index: int, default: T) -> T:
    """The value for a prompt: its own, or that for all."""
    return values[index if len(values) > 1 else 0] if values else default
