"""What requests ask of the sampler, each against arithmetic done here by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.sampling import SamplingParams
from baton_kernels.sampling import reference
from engine.model import sampler as sampler_module
from engine.model.choices import SampleBatch, Sampled
from engine.model.sampler import Sampler
from engine.step import Choice

torch.set_num_threads(1)

VOCAB = 12
EOS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Ask:
    """The token after `prompt + output`, from row `row` of the logits."""

    params: SamplingParams
    row: int = 0
    sample: int = 0
    prompt: tuple[int, ...] = (1, 2)
    output: tuple[int, ...] = ()


def begun(
    asks: Iterable[Ask], eos: tuple[int, ...] = (EOS,), device: str = "cpu", vocab_size: int = VOCAB
) -> tuple[Sampler, SampleBatch]:
    """Each ask as a sequence of its own, in the sampler's rows 2, 3, ..."""
    asks = list(asks)
    sampler = Sampler(len(asks) + 2, vocab_size, eos, torch.device(device))
    for row, ask in enumerate(asks, 2):
        sampler.begin(row, ask.params, ask.prompt, ask.output)
    return sampler, SampleBatch(
        logits_rows=[ask.row for ask in asks],
        rows=list(range(2, len(asks) + 2)),
        samples=[ask.sample for ask in asks],
        positions=[len(ask.prompt) + len(ask.output) for ask in asks],
        tokens=[[*ask.prompt, *ask.output] for ask in asks],
    )


def read(sampled: Sampled) -> list[Choice]:
    sampled.to_host()
    if sampled.tokens.is_cuda:
        torch.cuda.synchronize()
    return sampled.choices()


def choose(values: torch.Tensor, *asks: Ask) -> list[Choice]:
    sampler, batch = begun(asks, device=values.device.type, vocab_size=values.shape[1])
    return read(sampler.launch(values, sampler.prepare(batch)))


def logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]


def adjusted(values: torch.Tensor, params: SamplingParams, **where: tuple[int, ...]) -> list[float]:
    sampler, batch = begun([Ask(params, **where)])  # type: ignore[arg-type]
    columns = sampler.prepare(batch)
    assert columns
    own, rows = sampler._adjusted(values, columns)
    return own[rows[0]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_best_and_leaves_the_logits_alone(temperature: float) -> None:
    values = logits(4)
    before = values.clone()
    params = SamplingParams(temperature=temperature, repetition_penalty=1.5, logit_bias={0: -3.0})
    choose(values, *(Ask(params, row=i) for i in range(4)))
    assert torch.equal(values, before)
    chosen = choose(values, *(Ask(SamplingParams(temperature=temperature), row=i) for i in range(4)))
    assert [choice.token for choice in chosen] == values.argmax(-1).tolist()
    assert all(choice.logprobs is None for choice in chosen)


def test_no_choices() -> None:
    assert choose(torch.empty(0, VOCAB)) == []


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_half_precision_count_as_fp32(device: str) -> None:
    values = logits(3).bfloat16().to(device)
    asks = [
        Ask(greedy(num_logprobs=2), row=0),
        Ask(SamplingParams(temperature=0.7, seed=3, top_k=5, top_p=0.9, frequency_penalty=1.0), row=1, output=(4, 4)),
        Ask(SamplingParams(seed=4, num_logprobs=0), row=2),
    ]
    assert choose(values, *asks) == choose(values.float(), *asks)


def test_the_last_tokens_stay_on_the_device_by_row() -> None:
    sampler, batch = begun(Ask(greedy(), row=i) for i in range(4))
    values = logits(4)
    tokens = sampler.launch(values, sampler.prepare(batch)).tokens
    assert tokens.dtype == sampler.last_tokens.dtype == torch.int32
    assert sampler.last_tokens.tolist() == [0, 0, *values.argmax(-1).tolist()]


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    asks = [
        Ask(SamplingParams(seed=1, top_k=3, top_p=0.9, min_p=0.1, num_logprobs=2), row=0),
        Ask(greedy(repetition_penalty=1.2, logit_bias={1: 2.0}, min_tokens=4), row=1, output=(5,)),
        Ask(greedy(allowed_token_ids=frozenset({1, 2, 4}), bad_words_token_ids=((1,), (5, 2))), row=1, output=(5,)),
    ]
    values = logits(2).cuda()
    expected = choose(values, *asks)
    sampler, batch = begun(asks, device="cuda")
    try:
        with warnings.catch_warnings():  # that this mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        sampler.begin(3, asks[1].params, asks[1].prompt, asks[1].output)
        sampler.begin(4, asks[2].params, asks[2].prompt, asks[2].output)
        sampled = sampler.launch(values, sampler.prepare(batch))
        sampled.to_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sampled.choices() == expected


# ---- penalties, bias, min_tokens ----


def test_penalties_count_what_vllm_counts() -> None:
    values = torch.tensor([[1.0, -1.0, 2.0, -2.0] + [0.5] * 8])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.3, presence_penalty=0.1)
    got = adjusted(values, params, prompt=(0, 1, 1), output=(2, 2, 3))
    assert got[:4] == pytest.approx([0.5, -2.0, 1.0 - 0.7, -4.0 - 0.4])
    assert got[4:] == [0.5] * 8


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_the_host_has_not_read_are_penalised(device: str) -> None:
    """Each token once: the second best follows the best, whether the host tells of the first ones or not."""
    values = torch.linspace(0.0, 1.0, VOCAB, device=device)[None]
    params = greedy(presence_penalty=2.0)
    sampler, _ = begun([Ask(params)], device=device)
    steps = [sampler.launch(values, sampler.prepare(SampleBatch([0], [2], [0], [2 + i]))) for i in range(5)]
    assert [read(step)[0].token for step in steps] == [11, 10, 9, 8, 7]
    assert choose(values, Ask(params, output=(11, 10, 9, 8, 7)))[0].token == 6


def test_a_row_forgets_the_sequence_before() -> None:
    values = torch.linspace(0.0, 1.0, VOCAB)[None]
    sampler, batch = begun([Ask(greedy(presence_penalty=2.0, logit_bias={3: 5.0}), output=(11, 10))])
    for params, expected in ((greedy(), 11), (greedy(presence_penalty=2.0), 10), (greedy(frequency_penalty=0.2), 10)):
        sampler.begin(2, params, (1, 2), () if expected == 11 else (11,))
        assert sampler.launch(values, sampler.prepare(batch)).choices()[0].token == expected


def test_sequences_with_and_without_penalties_mix() -> None:
    values = logits(6)
    asks = [
        Ask(greedy(frequency_penalty=2.0 * (i % 2), logit_bias={i: 1.0} if i % 3 else {}), row=i, output=(5, 5, i))
        for i in range(6)
    ]
    assert choose(values, *asks) == [choose(values, ask)[0] for ask in asks]


def test_bias_is_added_before_penalties() -> None:
    values = torch.zeros(1, VOCAB)
    got = adjusted(values, SamplingParams(logit_bias={1: 4.0, 5: -100.0}, repetition_penalty=2.0), prompt=(1,))
    assert (got[1], got[5], got[0]) == (2.0, -100.0, 0.0)


@pytest.mark.parametrize(("ignore_eos", "forbidden"), [(False, {EOS, 7}), (True, {7})])
def test_ends_are_forbidden_until_min_tokens(ignore_eos: bool, forbidden: set[int]) -> None:
    ends = frozenset({7, 10**6})
    params = SamplingParams(min_tokens=2, stop_token_ids=ends, ignore_eos=ignore_eos, logit_bias={7: 3.0})
    for output in ((), (4,)):
        got = adjusted(logits(), params, output=output)
        assert {i for i, x in enumerate(got) if x == -math.inf} == forbidden
    assert -math.inf not in adjusted(logits(), params, output=(4, 4))


# ---- allowed tokens, bad words ----


@pytest.mark.parametrize("device", DEVICES)
def test_only_allowed_tokens_are_chosen(device: str) -> None:
    """Also where more are to be kept by top_k than are allowed, and beside requests that allow all."""
    values = logits(4).to(device)
    worst = [int(i) for i in values[0].argsort()[:2]]
    allowed = frozenset([*worst, 10**6])
    asks = [
        Ask(greedy(allowed_token_ids=allowed, logit_bias={5: 100.0}, num_logprobs=1)),
        *(Ask(SamplingParams(seed=i, top_k=4, allowed_token_ids=allowed)) for i in range(30)),
        Ask(greedy(), row=3),
    ]
    first, *drawn, free = choose(values, *asks)
    assert first.token == worst[1]
    assert first.logprobs is not None
    assert first.logprobs.top[0][0] == int(values[0].argmax()), "logprobs are of the raw logits"
    assert {choice.token for choice in drawn} == set(worst)
    assert free.token == int(values[3].argmax())


def test_a_row_forgets_the_allowed_tokens_before() -> None:
    values = torch.linspace(0.0, 1.0, VOCAB)[None]
    sampler, batch = begun([Ask(greedy(allowed_token_ids=frozenset({1}), bad_words_token_ids=((2,),)))])
    cases: list[tuple[dict[str, Any], int]]
    cases = [({"allowed_token_ids": frozenset({2, 4})}, 4), ({}, 11), ({"bad_words_token_ids": ((11,),)}, 10)]
    for params, expected in cases:
        sampler.begin(2, greedy(**params), (1, 2), ())
        assert sampler.launch(values, sampler.prepare(batch)).choices()[0].token == expected


@pytest.mark.parametrize("device", DEVICES)
def test_bad_words_see_the_output_and_not_the_prompt(device: str) -> None:
    values = torch.linspace(0.0, 1.0, VOCAB, device=device)[None]
    words = ((11,), (2, 10), (4, 5, 9))
    outputs = [(), (2,), (2, 4, 5), (4, 5, 2), (5,)]
    asks = [Ask(greedy(bad_words_token_ids=words), prompt=(4, 2), output=output) for output in outputs]
    assert [choice.token for choice in choose(values, *asks, Ask(greedy()))] == [10, 9, 10, 9, 10, 11]


@pytest.mark.parametrize("device", DEVICES)
def test_bad_words_see_a_token_that_the_host_has_not_read(device: str) -> None:
    values = torch.linspace(0.0, 1.0, VOCAB, device=device)[None]
    words = ((11, 11), (11, 10, 11), (10, 9, 11), (11, 10, 10), (7,))
    known: list[int] = [1, 2]
    sampler, _ = begun([Ask(greedy(bad_words_token_ids=words), prompt=(1, 2))], device=device)
    said: list[int] = []
    for position in range(2, 8):
        step = sampler.launch(values, sampler.prepare(SampleBatch([0], [2], [0], [position], [known])))
        known += said[-1:]  # a step late
        said += [choice.token for choice in read(step)]
    assert said == [11, 10, 9, 10, 11, 10]


def test_allowed_tokens_hold_even_if_all_of_them_complete_bad_words() -> None:
    params: dict[str, Any] = {"allowed_token_ids": frozenset({6, 7}), "bad_words_token_ids": ((6,), (7,), (2, 7))}
    values = logits()
    for asked in (greedy(**params), SamplingParams(seed=2, **params), greedy(repetition_penalty=1e6, **params)):
        assert choose(values, Ask(asked, output=(6,)))[0].token in (6, 7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("penalty", [1e-50, 1e-30])
def test_no_repetition_penalty_brings_a_forbidden_token_back(penalty: float, device: str) -> None:
    """1e-50 is 0 in fp32."""
    values = torch.full((1, VOCAB), -5.0, device=device)
    for rule in ({"allowed_token_ids": frozenset({4, 5})}, {"bad_words_token_ids": ((1,), (2,))}):
        params: dict[str, Any] = {**rule, "repetition_penalty": penalty}
        for asked in (greedy(**params), SamplingParams(seed=3, **params)):
            assert choose(values, Ask(asked))[0].token not in (1, 2)


# ---- logprobs ----


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_of_the_raw_logits(device: str) -> None:
    values = logits()
    params = greedy(num_logprobs=3, logit_bias={6: 100.0}, repetition_penalty=3.0)
    (choice,) = choose(values.to(device), Ask(params))
    total = math.log(sum(math.exp(x) for x in values[0].tolist()))
    assert choice.token == 6
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(values[0, 6].item() - total, abs=1e-5)
    best = sorted(range(VOCAB), key=lambda i: -values[0, i].item())[:3]
    assert [token for token, _ in choice.logprobs.top] == best
    assert [x for _, x in choice.logprobs.top] == pytest.approx([values[0, i].item() - total for i in best], abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_may_be_of_tokens_that_are_named(device: str) -> None:
    """Beside choices that name none."""
    values = logits(3).to(device)
    expected = values.float().log_softmax(dim=-1)
    first, most_likely, second = choose(
        values,
        Ask(greedy(num_logprobs=2, logprob_token_ids=(4, 1)), row=0),
        Ask(greedy(num_logprobs=3), row=1),
        Ask(greedy(num_logprobs=1, logprob_token_ids=(0,)), row=2),
    )
    for index, (choice, named) in enumerate(((first, [4, 1]), (second, [0]))):
        assert choice.logprobs is not None
        assert [token for token, _ in choice.logprobs.top] == named
        row = expected[2 * index].tolist()
        assert [value for _, value in choice.logprobs.top] == pytest.approx([row[token] for token in named], abs=1e-5)
        assert choice.logprobs.logprob == pytest.approx(row[choice.token], abs=1e-5)
    assert most_likely.logprobs is not None
    best = expected[1].topk(3).indices.tolist()
    assert [token for token, _ in most_likely.logprobs.top] == best


def test_each_choice_gets_as_many_logprobs_as_it_asked_for() -> None:
    numbers = [-1, 0, 2, 20]
    chosen = choose(logits(), *(Ask(greedy(num_logprobs=n)) for n in numbers))
    assert [None if c.logprobs is None else len(c.logprobs.top) for c in chosen] == [None, 0, 2, VOCAB]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [20, 21, 50, 3000, 5000])
def test_one_choice_may_ask_for_many_logprobs_and_others_for_few(device: str, most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    # apart from each other, since devices round differently
    values = torch.stack([torch.randperm(3000, generator=generator) for _ in range(3)]) * 0.004
    numbers = [2, most, -1, 20, 0]
    rows = [0, 1, 0, 2, 1]
    asks = [Ask(greedy(num_logprobs=number), row=row) for number, row in zip(numbers, rows, strict=True)]
    names = [(7, 2999), tuple(range(100, 120 + most // 21))]
    named = [Ask(greedy(num_logprobs=len(ids), logprob_token_ids=ids), row=2) for ids in names]
    expected = values.log_softmax(dim=-1)
    told = choose(values.to(device), *asks, *named)
    for ids, choice in zip(names, told[len(asks) :], strict=True):
        assert choice.logprobs is not None
        assert [token for token, _ in choice.logprobs.top] == [*ids]
        assert [value for _, value in choice.logprobs.top] == pytest.approx(expected[2, [*ids]].tolist(), abs=1e-5)
    for number, row, choice in zip(numbers, rows, told, strict=False):
        assert choice.token == int(values[row].argmax())
        if number < 0:
            assert choice.logprobs is None
            continue
        best = expected[row].topk(min(number, 3000))
        assert choice.logprobs is not None
        assert [token for token, _ in choice.logprobs.top] == best.indices.tolist()
        assert [value for _, value in choice.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_who_asks_for_few_logprobs_does_not_sort_a_vocabulary() -> None:
    values = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    for numbers, shapes in (([2, 3000, 20, -1], [(2, 20), (1, 3000)]), ([30, 21], [(2, 30)]), ([0, -1], [(1, 0)])):
        asks = [Ask(greedy(num_logprobs=number)) for number in numbers]
        sampler, batch = begun(asks, vocab_size=3000)
        sampled = sampler.launch(values, sampler.prepare(batch))
        assert [tuple(logprobs.values.shape) for logprobs in sampled._logprobs] == shapes


# ---- draws ----


def test_samples_of_one_row_are_those_of_single_requests_with_seeds_on_from_it() -> None:
    values = logits(3)
    params = SamplingParams(seed=2**64 - 2, presence_penalty=0.5)
    sampler, _ = begun([Ask(params)])
    together = sampler.launch(values, sampler.prepare(SampleBatch([1] * 8, [2] * 8, range(8), [2] * 8))).choices()
    single = [Ask(SamplingParams(seed=(2**64 - 2 + i) % 2**64, presence_penalty=0.5)) for i in range(8)]
    assert together == [choose(values[[1]], one)[0] for one in single]
    assert len({choice.token for choice in together}) > 1


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_drawn_and_filtered_rows_mix(device: str) -> None:
    values = logits(6).to(device)
    asks = [Ask(SamplingParams(temperature=0.8 * (i % 2), seed=i, top_k=5 * (i % 3)), row=i) for i in range(6)]
    together = choose(values, *asks)
    assert together == [choose(values, ask)[0] for ask in asks]
    assert [c.token for c in together[::2]] == values.argmax(-1)[::2].tolist()


def test_the_draw_changes_with_the_position() -> None:
    asks = [Ask(SamplingParams(temperature=5.0, seed=1), output=(4,) * n) for n in range(20)]
    assert len({choice.token for choice in choose(logits(), *asks)}) > 4


def test_a_draw_is_that_of_its_position_whatever_is_beside_it() -> None:
    values = logits(1)
    for seed in range(8):
        params = SamplingParams(seed=seed)
        asks = [Ask(params, output=(4,) * length) for length in (0, 3, 7)]
        together = [choice.token for choice in choose(values, *asks)]
        alone = [choose(values, ask)[0].token for ask in asks]
        noise = reference.gumbel_noise(torch.full((3,), seed), torch.tensor([2, 5, 9]), VOCAB)
        assert together == alone == (values + noise).argmax(-1).tolist()


def test_a_bias_is_for_its_own_request() -> None:
    values = logits(1)
    best = int(values.argmax())
    other = (best + 1) % VOCAB
    tokens = [choice.token for choice in choose(values, Ask(greedy()), Ask(greedy(logit_bias={other: 100.0})))]
    assert tokens == [best, other]


def test_steps_in_flight_have_tensors_of_their_own_and_few_sizes_are_kept() -> None:
    sampler, values = begun([Ask(SamplingParams(temperature=0.0))] * 3)[0], logits(3)

    def batch(num: int) -> SampleBatch:
        return SampleBatch([0] * num, [2] * num, [0] * num, range(2, 2 + num))

    early, late = sampler.prepare(batch(3)), sampler.prepare(SampleBatch([1] * 3, [3] * 3, [0] * 3, [2] * 3))
    assert early is not None
    assert late is not None
    assert (early.uploaded.rows.tolist(), late.uploaded.rows.tolist()) == ([2] * 3, [3] * 3)
    sampler.launch(values, early)
    assert (again := sampler.prepare(batch(3))) is not None
    assert again.uploaded is early.uploaded
    assert (other := sampler.prepare(batch(3))) is not None
    assert other.uploaded is not again.uploaded
    for num in range(1, 3 * sampler_module._MOST_SIZES):
        sampler.launch(values, sampler.prepare(batch(num)))
    assert len(sampler._unused) == sampler_module._MOST_SIZES
