"""The sampling parameters of a request, which all routes for chats, completions and tokens have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from baton.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_STOP_TOKEN_IDS, NAMES, RANGES
from router.http.fields import CONFIG, Biases, Strings, Whole, Words, between, sampling
from router.http.logits_processors import ProcessorList, plain_processors
from router.limits import MAX_N
from router.text.models import ServedModel
from router.text.num_logprobs import ALL, logprobs_range, num_logprobs
from router.text.structured_output import structured_output_of


class CommonSampling(BaseModel):
    """The sampling parameters to which all APIs for completions and tokens give the same names. `GenerationRequest` and
    `SamplingParams` check ranges, where the model is known."""

    model_config = CONFIG
    n: Whole | None = between(1, MAX_N)
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: Whole | None = between(-1, RANGES["top_k"].most)  # -1: vLLM's older way to say off, and SGLang's
    min_p: float | None = sampling("min_p")
    repetition_penalty: float | None = sampling("repetition_penalty")
    presence_penalty: float | None = sampling("presence_penalty")
    frequency_penalty: float | None = sampling("frequency_penalty")
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    stop: Strings = ()
    stop_token_ids: list[Whole] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    def sampling(self, **translated: Any) -> dict[str, Any]:
        """What is said of SamplingParams, by name. translated: those whose fields have other names here. Raises
        InvalidRequest."""
        given, unknown = self.model_fields_set & _PARAMETERS, self.model_extra or ()
        said: dict[str, Any] = {name: getattr(self, name) for name in given if name not in unknown}
        return {name: value for name, value in (said | translated).items() if value is not None}


class SamplingFields(CommonSampling):
    """Those of vLLM's `SamplingParams`."""

    seed: Whole | None = None  # also negative ones, modulo 2^64; -1: a drawn one
    max_tokens: Whole | None = sampling("max_tokens")
    min_tokens: Whole | None = sampling("min_tokens")
    allowed_token_ids: list[Whole] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: Words = ()
    logits_processors: ProcessorList | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Whole | None = between(ALL)
    logprob_token_ids: list[Whole] | None = Field(None, min_length=1)
    structured_outputs: dict[str, Any] | None = None

    def sampling(self, **translated: Any) -> dict[str, Any]:
        given = self.model_fields_set
        if "structured_outputs" in given and "structured_outputs" not in translated:
            translated["structured_outputs"] = structured_output_of(None, self.structured_outputs, {})
        if "logits_processors" in given:
            translated["logits_processors"] = plain_processors(self.logits_processors) or None
        return super().sampling(**translated)


_PARAMETERS = frozenset(NAMES)


F = TypeVar("F", bound=BaseModel)


def with_num_logprobs(body: F, model: ServedModel, *names: str) -> F:
    """The same with `ALL` in the fields of these names replaced by its number. Raises InvalidRequest if the model tells
    fewer logprobs."""
    counts = dict[str, int]()
    for name in names:
        if (asked := getattr(body, name)) is not None:
            if (count := num_logprobs(asked, model)) is None:
                raise InvalidRequest(f"`{name}` must be in {logprobs_range(model)}, not {asked}.", name)
            if count != asked:
                counts[name] = count
    return body.model_copy(update=counts) if counts else body


def check_logprob_token_ids(ids: Sequence[int] | None, model: ServedModel, where: str) -> None:
    """Raises InvalidRequest, in pydantic's words for a list. where: the field, with those around it."""
    if ids and len(ids) > model.max_logprobs:
        most = f"List should have at most {model.max_logprobs} items after validation"
        raise InvalidRequest(f"{where}: {most}, not {len(ids)}", where.partition(".")[0])
