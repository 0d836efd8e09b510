"""What requests ask of the sampler, each against arithmetic done here by hand."""

from __future__ import annotations

import math

import pytest
import torch

from baton.sampling import SamplingParams
from engine.sampler import Sampler, SampleRequest

torch.set_num_threads(1)

VOCAB = 12
EOS = 3


def request(params: SamplingParams, *, row: int = 0, sample: int = 0, prompt=(1, 2), output=()) -> SampleRequest:
    return SampleRequest(row, sample, params, [*prompt, *output], len(prompt))


def logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]


def adjusted(values: torch.Tensor, params: SamplingParams, **where: object) -> list[float]:
    return Sampler((EOS,))._adjust(values, [request(params, **where)])[0].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_best_and_leaves_the_logits_alone(temperature: float) -> None:
    values = logits(4)
    before = values.clone()
    params = SamplingParams(temperature=temperature, repetition_penalty=1.5, logit_bias={0: -3.0})
    Sampler((EOS,)).sample(values, [request(params, row=i) for i in range(4)])
    assert torch.equal(values, before)
    chosen = Sampler(()).sample(values, [request(SamplingParams(temperature=temperature), row=i) for i in range(4)])
    assert [choice.token for choice in chosen] == values.argmax(-1).tolist()
    assert all(choice.logprobs is None for choice in chosen)


def test_no_requests_no_choices() -> None:
    assert Sampler(()).sample(torch.empty(0, VOCAB), []) == []


def test_penalties_count_what_vllm_counts() -> None:
    values = torch.tensor([[1.0, -1.0, 2.0, -2.0] + [0.5] * 8])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.3, presence_penalty=0.1)
    got = adjusted(values, params, prompt=(0, 1), output=(2, 2, 3))
    assert got[:4] == pytest.approx([0.5, -2.0, 1.0 - 0.7, -4.0 - 0.4])
    assert got[4:] == [0.5] * 8


def test_bias_is_added_before_penalties() -> None:
    values = torch.zeros(1, VOCAB)
    got = adjusted(values, SamplingParams(logit_bias={1: 4.0, 5: -100.0}, repetition_penalty=2.0), prompt=(1,))
    assert (got[1], got[5], got[0]) == (2.0, -100.0, 0.0)


@pytest.mark.parametrize(("ignore_eos", "forbidden"), [(False, {EOS, 7}), (True, {7})])
def test_ends_are_forbidden_until_min_tokens(ignore_eos: bool, forbidden: set[int]) -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(7, 10**6, -1), ignore_eos=ignore_eos)
    for output in ((), (4,)):
        got = adjusted(logits(), params, output=output)
        assert {i for i, x in enumerate(got) if x == -math.inf} == forbidden
    assert -math.inf not in adjusted(logits(), params, output=(4, 4))


def test_logprobs_are_of_the_raw_logits() -> None:
    values = logits()
    params = greedy(num_logprobs=3, logit_bias={6: 100.0}, repetition_penalty=3.0)
    (choice,) = Sampler(()).sample(values, [request(params)])
    total = math.log(sum(math.exp(x) for x in values[0].tolist()))
    assert choice.token == 6
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(values[0, 6].item() - total, abs=1e-5)
    best = sorted(range(VOCAB), key=lambda i: -values[0, i].item())[:3]
    assert [token for token, _ in choice.logprobs.top] == best
    assert [x for _, x in choice.logprobs.top] == pytest.approx([values[0, i].item() - total for i in best], abs=1e-5)


def test_each_request_gets_as_many_logprobs_as_it_asked_for() -> None:
    numbers = [-1, 0, 2, 20]
    chosen = Sampler(()).sample(logits(), [request(greedy(num_logprobs=n)) for n in numbers])
    assert [None if c.logprobs is None else len(c.logprobs.top) for c in chosen] == [None, 0, 2, VOCAB]


def test_samples_of_one_row_are_those_of_single_requests_with_seeds_on_from_it() -> None:
    values = logits(3)
    many = [request(SamplingParams(seed=2**64 - 2), row=1, sample=i) for i in range(8)]
    single = [request(SamplingParams(seed=(2**64 - 2 + i) % 2**64)) for i in range(8)]
    together = Sampler(()).sample(values, many)
    alone = [Sampler(()).sample(values[[1]], [one])[0] for one in single]
    assert together == alone
    assert len({choice.token for choice in together}) > 1


def test_greedy_and_drawn_rows_mix() -> None:
    values = logits(6)
    asks = [request(SamplingParams(temperature=0.8 * (i % 2), seed=i, top_k=5 * (i % 3)), row=i) for i in range(6)]
    together = Sampler(()).sample(values, asks)
    alone = [Sampler(()).sample(values, [ask])[0] for ask in asks]
    assert together == alone
    assert [c.token for c in together[::2]] == values.argmax(-1)[::2].tolist()


def test_the_draw_changes_with_the_position() -> None:
    asks = [request(SamplingParams(temperature=5.0, seed=1), output=(4,) * n) for n in range(20)]
    tokens = {choice.token for choice in Sampler(()).sample(logits(), asks)}
    assert len(tokens) > 4
