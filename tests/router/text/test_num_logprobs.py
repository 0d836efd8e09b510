"""How many logprobs a request may ask for, of each token and in all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.node_info import GenerationDefaults
from baton.sampling import SamplingParams
from router.text.generation_request import GenerationRequest, check_answer_logprobs, sampling_params
from router.text.models import ServedModel
from router.text.num_logprobs import STREAMED, UNLIMITED, WHOLE
from router.text.prompt_logprobs import check_prompt_logprobs

TOKENIZER: Any = None
MODEL = ServedModel("m", 100_000, 50_000, TOKENIZER, None, GenerationDefaults())
TELLS_50 = dataclasses.replace(MODEL, max_logprobs=50)
TELLS_ALL = dataclasses.replace(MODEL, max_logprobs=50_000)
TELLS_MORE = dataclasses.replace(MODEL, max_logprobs=60_000)


def asked(model: ServedModel, **sampling: Any) -> tuple[int, int | None]:
    params = sampling_params(GenerationRequest(request_id="r", prompts=((5,),), sampling=sampling), model, 1)
    return params.num_logprobs, params.num_prompt_logprobs


def test_each_number_is_one_of_the_models_range() -> None:
    assert asked(MODEL) == (-1, None)
    assert asked(MODEL, num_logprobs=20, num_prompt_logprobs=0) == (20, 0)
    assert asked(TELLS_50, num_logprobs=0, num_prompt_logprobs=50) == (0, 50)
    assert asked(TELLS_ALL, num_logprobs=-1, num_prompt_logprobs=-1) == (50_000, 50_000)
    assert asked(TELLS_MORE, num_logprobs=-1, num_prompt_logprobs=60_000) == (50_000, 60_000)
    assert asked(TELLS_50, logprob_token_ids=range(50)) == (50, None)


@pytest.mark.parametrize(
    ("model", "sampling", "says"),
    [
        (MODEL, {"num_logprobs": 21}, "logprobs must be at most 20, not 21"),
        (MODEL, {"num_logprobs": -1}, "logprobs must be 0 or more, not -1"),
        (MODEL, {"num_prompt_logprobs": 21}, "prompt_logprobs must be in [0, 20], not 21"),
        (MODEL, {"num_prompt_logprobs": -1}, "prompt_logprobs must be in [0, 20], not -1"),
        (MODEL, {"logprob_token_ids": range(21)}, "logprobs must be at most 20, not 21"),
        (TELLS_50, {"num_logprobs": 51}, "logprobs must be at most 50, not 51"),
        (TELLS_50, {"num_prompt_logprobs": -1}, "prompt_logprobs must be in [0, 50], not -1"),
        (TELLS_ALL, {"num_prompt_logprobs": 50_001}, "prompt_logprobs must be in [-1, 50000], not 50001"),
        (TELLS_ALL, {"num_logprobs": -2}, "logprobs must be 0 or more, not -2"),
    ],
)
def test_others_are_refused_with_the_range(model: ServedModel, sampling: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        asked(model, **sampling)
    assert refusal.value.message == says
    assert str(refusal.value.param) == says.partition(" ")[0]


def test_a_beam_is_as_wide_as_ever() -> None:
    """Though its steps report the logprobs of twice as many tokens."""
    for model in (dataclasses.replace(MODEL, max_logprobs=0), TELLS_ALL):
        assert asked(model, beam_width=10) == (-1, None)
        with pytest.raises(InvalidRequest, match=r"beam_width must be 0 .* or at most 10, not 11"):
            asked(model, beam_width=11)


@pytest.mark.parametrize(
    ("num_logprobs", "max_tokens", "n", "limits", "says"),
    [
        (49, 83_886, 1, WHOLE, ""),
        (49, 83_887, 1, WHOLE, "at most 4194304 in all answers here, not 4194350: n, max_tokens or logprobs must be"),
        (49, 41_943, 2, STREAMED, ""),
        (49, 41_944, 2, STREAMED, "at most 4194304"),
        (50_000, 83, 1, WHOLE, ""),
        (32_767, 1, 1, STREAMED, ""),
        (32_768, 1, 1, STREAMED, "at most 32768 in one event here, not 32769: "),
        (50_000, 100_000, 128, UNLIMITED, ""),
    ],
)
def test_many_of_each_token_are_bounded_in_all(
    num_logprobs: int, max_tokens: int, n: int, limits: Any, says: str
) -> None:
    wanted = GenerationRequest(request_id="r", prompts=((5,),), n=n, logprob_limits=limits)
    params = [SamplingParams(num_logprobs=num_logprobs, max_tokens=max_tokens)]
    if not says:
        check_answer_logprobs(params, wanted)
        return
    with pytest.raises(InvalidRequest) as refusal:
        check_answer_logprobs(params, wanted)
    assert says in refusal.value.message
    assert refusal.value.param == "logprobs"
    if n == 1 and num_logprobs == 49:
        check_answer_logprobs([dataclasses.replace(params[0], max_tokens=max_tokens // 2)] * 2, wanted)
        with pytest.raises(InvalidRequest):
            check_answer_logprobs([dataclasses.replace(params[0], max_tokens=1 + max_tokens // 2)] * 2, wanted)


def test_all_beams_count() -> None:
    wanted = GenerationRequest(request_id="r", prompts=((5,),))
    params = SamplingParams(num_logprobs=49, max_tokens=41_944, temperature=0.0, beam_width=2)
    with pytest.raises(InvalidRequest, match="not 4194400"):
        check_answer_logprobs([params], wanted)
    streamed = dataclasses.replace(wanted, logprob_limits=STREAMED)
    check_answer_logprobs([dataclasses.replace(params, max_tokens=655)], streamed)
    with pytest.raises(InvalidRequest, match="at most 32768 in one event here, not 32800"):
        check_answer_logprobs([dataclasses.replace(params, max_tokens=656)], streamed)


def test_those_of_a_prompt_are_bounded_in_all_however_they_are_asked_for() -> None:
    for asks in (-1, 50_000):
        sampling = {"num_prompt_logprobs": asks}
        wanted = GenerationRequest(request_id="r", prompts=((5,),), sampling=sampling)
        check_prompt_logprobs([(wanted, 20)], TELLS_ALL)
        with pytest.raises(InvalidRequest, match="at most 1048576 logprobs of all answers' prompts here, not 1050021"):
            check_prompt_logprobs([(wanted, 20), (wanted, 1)], TELLS_ALL)
        check_prompt_logprobs([(dataclasses.replace(wanted, logprob_limits=UNLIMITED), 21)], TELLS_ALL)
