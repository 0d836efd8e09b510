"""Ranges of sampling parameters, at their edges."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.logits_processors import LogitsProcessor
from baton.sampling import NAMES, RANGES, SamplingParams
from baton.v1 import common_pb2, generation_pb2

INSIDE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e6},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": 2**31 - 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": 2**64 - 1},
    {"max_tokens": 1},
    {"max_tokens": 2**31 - 1},
    {"min_tokens": 16},
    {"num_logprobs": -1},
    {"num_logprobs": 20},
    {"num_logprobs": 20, "logprob_token_ids": (*range(19), 2**31 - 1)},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e6},
    {"logit_bias": {0: -100.0, 5: 100.0}},
    {"allowed_token_ids": frozenset({0, 2**31 - 1})},
    {"logits_processors": (LogitsProcessor("x"),) * 16},
    {"beam_width": 10, "temperature": 0.0, "length_penalty": -10.0},
    {"bad_words_token_ids": ((0,),) * 512},
    {"bad_words_token_ids": ((2**31 - 1,) * 4096,)},
]
OUTSIDE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1e-9}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.001}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.001}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -1}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"num_logprobs": 2**31}, "logprobs"),
    ({"num_prompt_logprobs": 2**31}, "prompt_logprobs"),
    ({"num_prompt_logprobs": -1}, "prompt_logprobs"),
    ({"num_logprobs": -2}, "logprobs"),
    ({"num_logprobs": 20, "logprob_token_ids": tuple(range(21))}, "logprob_token_ids"),
    ({"num_logprobs": 1, "logprob_token_ids": (2**31,)}, "logprob_token_ids"),
    ({"logprob_token_ids": (5,)}, "logprob_token_ids"),
    ({"beam_width": 2, "temperature": 0.0, "num_logprobs": 1, "logprob_token_ids": (5,)}, "logprob_token_ids"),
    ({"presence_penalty": 2.001}, "presence_penalty"),
    ({"frequency_penalty": -2.001}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logit_bias": {0: 100.5}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": frozenset({-1, 5})}, "allowed_token_ids"),
    ({"allowed_token_ids": frozenset({5, 2**31})}, "allowed_token_ids"),
    ({"allowed_token_ids": frozenset(range(16_385))}, "allowed_token_ids"),
    ({"logits_processors": (LogitsProcessor("x"),) * 17}, "logits_processors"),
    ({"beam_width": 11, "temperature": 0.0}, "beam_width"),
    ({"beam_width": 2}, "temperature"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"beam_width": 2, "temperature": 0.0, "length_penalty": float("nan")}, "length_penalty"),
    ({"beam_width": 2, "temperature": 0.0, "frequency_penalty": 0.5}, "frequency_penalty"),
    ({"beam_width": 2, "temperature": 0.0, "bad_words_token_ids": ((5,),)}, "bad_words"),
    ({"bad_words_token_ids": ((),)}, "bad_words"),
    ({"bad_words_token_ids": ((0, 2**31),)}, "bad_words"),
    ({"bad_words_token_ids": ((0,),) * 513}, "bad_words"),
    ({"bad_words_token_ids": ((0,) * 2048, (0,) * 2049)}, "bad_words"),
]


@pytest.mark.parametrize("params", INSIDE, ids=str)
def test_edges_are_inside(params: dict[str, Any]) -> None:
    SamplingParams(**params)


@pytest.mark.parametrize(("params", "named"), OUTSIDE, ids=str)
def test_what_lies_outside_is_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**params)
    assert refused.value.param == named


def test_every_number_has_a_range() -> None:
    plain = SamplingParams()
    numbers = {name for name in NAMES if type(getattr(plain, name)) in (int, float)}
    assert numbers == RANGES.keys()
    assert all(getattr(plain, name) in valid for name, valid in RANGES.items())


def test_each_has_a_field_of_its_name_between_nodes_and_from_clients() -> None:
    assert set(NAMES) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    from_clients = set(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert set(NAMES) - from_clients == {"num_logprobs", "num_prompt_logprobs", "bad_words_token_ids"}, (
        "without `num_`, `_token_ids`"
    )


@pytest.mark.parametrize(
    ("params", "depends"),
    [
        ({}, False),
        ({"bad_words_token_ids": ((1,), (2,)), "allowed_token_ids": frozenset({3})}, False),
        ({"bad_words_token_ids": ((1,), (2, 3))}, True),
        ({"presence_penalty": 0.5}, True),
    ],
    ids=str,
)
def test_which_parameters_depend_on_earlier_tokens(params: dict[str, Any], depends: bool) -> None:
    assert SamplingParams(**params).depends_on_output is depends


@pytest.mark.parametrize(("name", "arguments"), [("", ""), ("x" * 257, ""), ("a\n", ""), ("x", "x" * 65_537)])
def test_a_logits_processor_has_a_name_and_bounded_arguments(name: str, arguments: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        LogitsProcessor(name, arguments)
    assert refused.value.param == "logits_processors"
