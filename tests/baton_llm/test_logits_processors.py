"""Logits processors of an installed package, through a prefill engine and a decode engine."""

from __future__ import annotations

import pytest

from baton_llm import InvalidRequest, PromptsFailed, SamplingParams
from tests.baton_llm.conftest import wait_whole

TOKENS = [300, 301, 302]
FORCED = {"name": "forced", "args": [TOKENS]}


def asking(*processors, **fields):
    return SamplingParams(logits_processors=processors, **{"max_tokens": 7, "ignore_eos": True, **fields})


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 1), (1.5, 2)])
def test_it_sees_the_output_on_both_nodes(llm, temperature, n):
    params = asking(FORCED, temperature=temperature, n=n)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    assert [answer.token_ids for answer in output.outputs] == [(TOKENS * 3)[:7]] * n


def test_it_may_see_the_prompt_and_comes_before_what_else_changes_logits(llm):
    [output] = llm.generate([[400, 401, 402]], asking("after_prompt", temperature=0.0), use_tqdm=False)
    assert output.outputs[0].token_ids == [400, 401, 402, 400, 401, 402, 400]
    params = asking("after_prompt", temperature=0.0, allowed_token_ids=[401])
    [output] = llm.generate([[400, 401, 402]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [401] * 7


def test_several_run_in_order_with_keywords_too(llm):
    forced = {"qualname": "forced", "args": [[9]], "kwargs": {"logit": 1.0}}
    [output] = llm.generate("x", asking("after_prompt", forced), use_tqdm=False)
    assert output.outputs[0].token_ids == [9] * 7


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "broken_at failed: KeyError: 'no such token'"),
        ("shape", r"broken_at returned logits of shape \[4095\], not of \[4096\]"),
        ("type", "broken_at returned logits a NoneType"),
        ("nan", "left no token"),
        ("nothing", "left no token"),
    ],
)
def test_one_that_fails_ends_its_own_request(llm, at, how, text):
    broken = asking({"name": "broken_at", "args": [at, how]}, max_tokens=6)
    with pytest.raises(PromptsFailed) as failed:
        llm.generate([[400, 401], [400, 402]], [broken, asking(FORCED)], use_tqdm=False)
    assert list(failed.value.errors) == [0]
    with pytest.raises(InvalidRequest, match=text):
        raise failed.value.errors[0]
    assert failed.value.outputs[1].outputs[0].token_ids == (TOKENS * 3)[:7]
    wait_whole(llm)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("frob", "none called 'frob'; it has after_prompt, broken_at, forced"),
        ("forced", "forced refuses its arguments: TypeError: .*token_ids"),
    ],
)
def test_what_the_nodes_cannot_make_is_refused(llm, wanted, text):
    with pytest.raises(InvalidRequest, match=text):
        llm.generate("x", asking(wanted), use_tqdm=False)


@pytest.mark.parametrize("wanted", [7, {}, {"name": 7}, {"name": "forced", "args": 7}, {"name": "forced", "frob": 7}])
def test_other_forms_are_refused_at_once(wanted):
    with pytest.raises(InvalidRequest) as refused:
        asking(wanted)
    assert refused.value.param == "logits_processors"
