"""Sampling parameters, as several messages contain them, and what belongs to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.logits_processors import MAX_LOGITS_PROCESSORS, LogitsProcessor
from baton.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    NAMES,
    SamplingParams,
)
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.v1 import common_pb2
from baton.wire.limits import ANY, Limits
from baton.wire.values import TOKEN_BYTES, pack_tokens, read_tokens


def write_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    given: dict[str, Any] = {name: value for name in NAMES if (value := getattr(params, name)) or name in _EXPLICIT}
    for name in given.keys() & _SAMPLING_WRITERS.keys():
        given[name] = _SAMPLING_WRITERS[name](given[name])
    return common_pb2.SamplingParams(**given)


def read_sampling(wire: common_pb2.SamplingParams, limits: Limits = ANY) -> SamplingParams:
    """Raises InvalidRequest before building anything from too many token ids."""
    for param, ids, most in (
        ("stop_token_ids", wire.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", wire.logit_bias, MAX_LOGIT_BIAS),
        ("allowed_token_ids", wire.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
        ("logprob_token_ids", wire.logprob_token_ids, limits.max_logprobs),
    ):
        if len(ids) > most:
            raise InvalidRequest(f"{param}: {len(ids)} tokens are more than {most}", param)
    for param, count in (("logprobs", wire.num_logprobs), ("prompt_logprobs", wire.num_prompt_logprobs)):
        if count > limits.max_logprobs:
            raise InvalidRequest(f"{param} must be at most {limits.max_logprobs}, not {count}", param)
    for param, ids in (
        ("logit_bias", wire.logit_bias),
        ("allowed_token_ids", wire.allowed_token_ids),
        ("logprob_token_ids", wire.logprob_token_ids),
    ):
        highest = max(ids, default=0)
        if highest >= limits.vocab_size:
            text = f"token ids of {param} must be in [0, {limits.vocab_size}), not {highest}"
            raise InvalidRequest(text, param)
    given = {name: getattr(wire, name) for name in NAMES}
    others = {
        "logit_bias": dict(wire.logit_bias),
        "stop_token_ids": frozenset(wire.stop_token_ids),
        "allowed_token_ids": frozenset(wire.allowed_token_ids),
        "logprob_token_ids": tuple(wire.logprob_token_ids),
        "bad_words_token_ids": _read_bad_words(wire.bad_words_token_ids, limits) if wire.bad_words_token_ids else (),
        "structured_outputs": read_structured(wire.structured_outputs) if wire.HasField("structured_outputs") else None,
        "num_prompt_logprobs": wire.num_prompt_logprobs if wire.HasField("num_prompt_logprobs") else None,
        "logits_processors": read_processors(wire.logits_processors),
        "length_penalty": wire.length_penalty if wire.HasField("length_penalty") else 1.0,
    }
    return SamplingParams(**{**given, **others})


def write_structured(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    return common_pb2.StructuredOutput(kind=structured.kind.value, text=structured.text)


def read_structured(wire: common_pb2.StructuredOutput) -> StructuredOutput:
    """Raises InvalidRequest."""
    try:
        kind = StructuredKind(wire.kind)
    except ValueError:
        text = f"structured_outputs: {wire.kind[:64]!r} is no known kind"
        raise InvalidRequest(text, "structured_outputs") from None
    return StructuredOutput(kind, wire.text)


def write_processors(processors: Iterable[LogitsProcessor]) -> list[common_pb2.LogitsProcessor]:
    return [common_pb2.LogitsProcessor(name=one.name, arguments=one.arguments) for one in processors]


def read_processors(wire: Sequence[common_pb2.LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Raises InvalidRequest."""
    if len(wire) > MAX_LOGITS_PROCESSORS:
        text = f"logits_processors must be at most {MAX_LOGITS_PROCESSORS}, not {len(wire)}"
        raise InvalidRequest(text, "logits_processors")
    return tuple(LogitsProcessor(one.name, one.arguments) for one in wire)


def _read_bad_words(wire: Sequence[bytes], limits: Limits) -> tuple[tuple[int, ...], ...]:
    if len(wire) > MAX_BAD_WORDS or sum(map(len, wire)) > TOKEN_BYTES * MAX_BAD_WORD_TOKENS:
        text = f"bad_words: more than {MAX_BAD_WORDS} token sequences, or than {MAX_BAD_WORD_TOKENS} tokens"
        raise InvalidRequest(text, "bad_words")
    known = dataclasses.replace(limits, max_model_len=MAX_BAD_WORD_TOKENS)
    return tuple(read_tokens(word, known, "bad_words") for word in wire)


def _write_bad_words(words: Iterable[Sequence[int]]) -> list[bytes]:
    return [pack_tokens(word, "bad_words") for word in words]


_EXPLICIT = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields if field.has_presence}
"""To be said although it is 0. Of the others, protobuf does not send what is 0, false or empty."""
_SAMPLING_WRITERS: dict[str, Callable[[Any], Any]] = {
    "stop_token_ids": sorted,
    "structured_outputs": lambda structured: structured and write_structured(structured),
    "allowed_token_ids": sorted,
    "bad_words_token_ids": _write_bad_words,
    "logits_processors": write_processors,
}
