"""`SamplingParams` names what is wrong with it, and lacks no parameter."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from baton.node_info import GenerationDefaults
from baton.sampling import NAMES
from baton_llm import InvalidRequest, SamplingParams, StructuredOutputsParams
from baton_llm.sampling_params import default_params, request_of


def test_every_parameter_of_the_nodes_can_be_set():
    own = {field.name for field in fields(SamplingParams)}
    assert set(NAMES) - own == {"num_logprobs", "num_prompt_logprobs", "bad_words_token_ids"}
    texts = {"stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"}
    assert own - set(NAMES) == {"n", "logprobs", "prompt_logprobs", "bad_words", "output_kind", *texts}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", True),
        ("n", 1000),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 2**31),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("seed", "7"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", "\ud800"),
        ("stop", iter(["a"])),
        ("stop", [str(i) for i in range(65)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("stop_token_ids", iter([7])),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", [-1]),
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("bad_words", 0),
        ("bad_words", ["\ud800"]),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", [1]),
        ("logit_bias", []),
        ("structured_outputs", []),
        ("structured_outputs", {"regex": "\ud800"}),
        ("output_kind", 1),
        ("logits_processors", "name"),
        ("ignore_eos", 1),
        ("detokenize", 0),
        ("presence_penalty", 2.5),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name


def test_how_many_logprobs_a_model_tells_is_not_known_yet():
    params = SamplingParams(logprobs=4096, prompt_logprobs=-1)
    assert (params.sampling()["num_logprobs"], params.sampling()["num_prompt_logprobs"]) == (4096, -1)
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be 0 or more, -1 for all, or None, not -2"):
        SamplingParams(prompt_logprobs=-2)


def test_stop_texts_need_texts():
    with pytest.raises(InvalidRequest, match="stop must be None with detokenize=False, not 'a'"):
        SamplingParams(stop="a", detokenize=False)


def test_it_is_frozen_and_knows_no_other_names():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", {"type": "object"}),
        ("json", '{"type":"object"}'),
        ("regex", "[0-9]+"),
        ("choice", ["a", "b"]),
        ("grammar", "start: /a+/"),
        ("json_object", True),
    ],
)
def test_structured_outputs_are_params_or_a_dict(name, value):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**{name: value}))
    stated = params.sampling()["structured_outputs"]
    assert stated == SamplingParams(structured_outputs={name: value}).sampling()["structured_outputs"]


@pytest.mark.parametrize("several", [{}, {"regex": "a", "choice": ["a"]}, {"json": 7}])
def test_structured_outputs_are_exactly_one(several):
    with pytest.raises(InvalidRequest) as error:
        StructuredOutputsParams(**several)
    assert error.value.param == "structured_outputs"


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], structured_outputs=StructuredOutputsParams(choice=["a"]))
    clone = params.clone()
    assert clone == params
    assert clone.stop is not params.stop


def test_only_what_is_not_none_is_stated():
    request = request_of(SamplingParams(max_tokens=None, stop="a", logprobs=0, seed=-1, top_k=-1), "r", (1,))
    assert request.stop == ("a",)
    assert request.sampling["num_logprobs"] == 0
    assert request.sampling["seed"] == -1
    assert not {"max_tokens", "logit_bias", "stop_token_ids"} & request.sampling.keys()
    assert request_of(None, "r", (1,)).sampling == {}


def test_a_models_own_are_what_its_generation_config_states():
    assert default_params(GenerationDefaults(eos_token_ids=(4,))) == SamplingParams()
    stated = GenerationDefaults((4,), 0.6, 0.9, 20, 0.1, 1.1, max_new_tokens=512)
    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=512)
    assert default_params(stated) == expected
    with pytest.raises(InvalidRequest, match="top_p"):
        default_params(GenerationDefaults(top_p=2.0))


def test_a_long_minimum_needs_no_maximum():
    assert SamplingParams(max_tokens=None, min_tokens=100).min_tokens == 100
