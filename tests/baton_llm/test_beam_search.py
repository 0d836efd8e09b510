"""Beam search through a prefill engine and a decode engine, against a plain one over transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton_llm import BeamSearchParams, InvalidRequest, SamplingParams
from tests.baton_llm.conftest import wait_whole
from tests.engine.beam_reference import beam_search

CHECKPOINT = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"
PROMPTS = ["Once upon a time", "Hi"]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def plain_search(model, prompt, params):
    def logprobs(tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([list(tokens)])).logits[0, -1]
        values, ids = logits.float().log_softmax(-1).topk(2 * params.beam_width)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    ends = model.generation_config.eos_token_id
    eos = () if params.ignore_eos else {ends} if isinstance(ends, int) else set(ends)
    return beam_search(logprobs, prompt, params.beam_width, params.max_tokens, eos, params.length_penalty)


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=6),
        BeamSearchParams(beam_width=3, max_tokens=8),
        BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.0),
        BeamSearchParams(beam_width=10, max_tokens=3, ignore_eos=True),
    ],
    ids=str,
)
def test_it_finds_what_transformers_logits_give(llm, model, params):
    outputs = llm.beam_search(PROMPTS, params)
    for output in outputs:
        expected = plain_search(model, output.prompt_token_ids, params)
        assert [tuple(answer.token_ids) for answer in output.outputs] == [tokens for tokens, _ in expected]
        scores = [answer.cumulative_logprob for answer in output.outputs]
        assert scores == pytest.approx([logprob for _, logprob in expected], abs=1e-3)
    wait_whole(llm)


def test_it_finds_what_transformers_own_search_finds(llm, model):
    """Without EOS all beams are equally long, and the two score alike."""
    [output] = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    ids = torch.tensor([output.prompt_token_ids])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [answer.token_ids for answer in output.outputs] == [one[ids.shape[1] :].tolist() for one in found]


def test_the_best_of_more_beams_and_a_prompt_of_one_token(llm, model):
    params = SamplingParams(n=2, beam_width=4, temperature=0.0, max_tokens=6)
    for prompt in ([400], [400, 401]):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        expected = plain_search(model, prompt, BeamSearchParams(beam_width=4, max_tokens=6))
        assert [tuple(answer.token_ids) for answer in output.outputs] == [tokens for tokens, _ in expected[:2]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"logits_processors": ["forced"]}, "logits_processors"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 0, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{"beam_width": 2, "temperature": 0.0, **fields})
    assert refused.value.param == param


@pytest.mark.parametrize("width", [0, -2, "2", 11])
def test_a_width_that_cannot_be_is_refused(llm, width):
    with pytest.raises(InvalidRequest) as refused:
        llm.beam_search("x", BeamSearchParams(beam_width=width, max_tokens=2))
    assert refused.value.param == "beam_width"
