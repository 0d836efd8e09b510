"""The Triton kernels of sampling against the reference, and the thresholds against the filters' definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.sampling import IN_PROMPT, DrawParams, kernel, reference
from baton_kernels.sampling.threshold import thresholds

torch.set_num_threads(1)

GPU = pytest.mark.gpu
SIZES = [
    pytest.param("cpu", torch.float32, 1000, id="interpreted"),
    pytest.param("cpu", torch.float16, 2500, id="interpreted-fp16"),
    pytest.param("cuda", torch.float32, 128256, id="fp32", marks=GPU),
    pytest.param("cuda", torch.bfloat16, 128256, id="bf16", marks=GPU),
    pytest.param("cuda", torch.bfloat16, 50257, id="odd", marks=GPU),
]
BATCHES = [
    pytest.param(*size.values, batch, id=f"{size.id}-{batch}", marks=size.marks)
    for size in SIZES
    for batch in ((1, 5, 64, 600) if size.marks else (1, 5))
]
NUDGE = 1e-5  # of a probability: a boundary hit this closely may round either way


def made(num_rows: int, device: str, seed: int = 0) -> DrawParams:
    """One row in three is greedy, one draws from everything, one is filtered."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.arange(num_rows) % 3
    columns = {
        "temperature": torch.rand(num_rows, generator=g).clamp(min=0.1) * (kind > 0),
        "top_k": torch.randint(0, 50, (num_rows,), generator=g) * (kind > 1),
        "top_p": torch.where(kind > 1, torch.rand(num_rows, generator=g).clamp(min=0.05), 1.0),
        "min_p": torch.rand(num_rows, generator=g) * 0.1 * (kind > 1),
        "seed": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g),
        "position": torch.randint(0, 2**17, (num_rows,), generator=g),
    }
    return DrawParams(**{name: column.to(device) for name, column in columns.items()})


def peaked(num_rows: int, vocab_size: int, device: str, seed: int = 0) -> Tensor:
    """Like a language model's: most tokens far below a few."""
    x = torch.randn(num_rows, vocab_size, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x * 2 + 0.4 * x**3


def gaps(logits: Tensor, rows: Tensor, params: DrawParams, tokens: Tensor) -> Tensor:
    """[num_choices]: by how much the noisy score of the reference's choice exceeds that of `tokens`."""
    expected = reference.sample(logits, rows, params, filtered=True).long()
    own = logits[rows].float()
    drawn = params.temperature > 0
    noise = reference.gumbel_noise(params.seed, params.position, logits.shape[1])
    scores = torch.where(drawn[:, None], own / params.temperature[:, None] + noise, own)
    return (scores.gather(1, expected[:, None]) - scores.gather(1, tokens.long()[:, None]))[:, 0]


@pytest.mark.parametrize(("device", "dtype", "vocab_size", "batch"), BATCHES)
def test_choices_are_those_of_the_reference(device: str, dtype: torch.dtype, vocab_size: int, batch: int) -> None:
    logits = peaked(batch + 2, vocab_size, device).to(dtype)
    logits[:, 7] = float("-inf")
    rows = torch.arange(batch, 0, -1, device=device)
    params = made(batch, device)
    tokens = kernel.sample(logits, rows, params, True)
    assert tokens.dtype == torch.int32
    assert gaps(logits, rows, params, tokens).abs().max() < 1e-4
    same = tokens == reference.sample(logits, rows, params, filtered=True)
    assert same.float().mean() > 0.98
    greedy = params.temperature == 0
    assert bool(same[greedy].all())
    assert torch.equal(kernel.sample(logits, rows, None, True), reference.sample(logits, rows, None, filtered=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_lowest_of_equal_tokens_wins(device: str) -> None:
    logits = torch.zeros(4, 5000, device=device)
    logits[1, [4999, 77, 2048]] = 1.0
    logits[2] = float("-inf")
    logits[3, 3:] = float("nan")
    assert kernel.sample(logits, torch.arange(4, device=device), None, False).tolist() == [0, 77, 0, 0]


def num_kept(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """By the definitions, in fp64; with all that tie with the last one kept."""
    scores = (row.double() - row.double().max()) / temperature
    ordered = scores.sort(descending=True).values
    kept = ordered[ordered.exp() >= min_p]
    kept = kept[: top_k or None]
    probs = kept.softmax(-1)
    if top_p < 1.0:
        kept = kept[probs.cumsum(-1) - probs < top_p]
    return int((scores >= kept[-1]).sum()) if len(kept) else int((scores == 0).sum())


LOGITS = {
    "peaked": lambda x: x * 2 + 0.4 * x**3,
    "flat": lambda x: x * 0.01,
    "tied": lambda x: (x * 2).round() / 2,
    "two values": lambda x: (x > 1).float(),
    "one value": torch.zeros_like,
    "forbidden": lambda x: torch.where(x > 1.5, x, float("-inf")),
    "low": lambda x: x - 1000.0,
    "around zero": lambda x: torch.where(x > 0, -0.0, x.abs() * 1e-3),
}
FILTERS = [  # temperature, top_k, top_p, min_p
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 0.95, 0.0),
    (0.7, 50, 1.0, 0.05),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 0.999, 0.0),
    (0.3, 0, 0.5, 0.02),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (1e-4, 40, 0.9, 0.0),
    (1e5, 700, 0.6, 0.0),
    (1.0, 10**6, 0.8, 0.0),
]


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(
    ("device", "dtype", "vocab_size", "share"),
    [
        ("cpu", torch.float32, 1100, 4),
        pytest.param("cpu", torch.float32, 1100, 1, marks=pytest.mark.full),
        *(pytest.param(*size.values, 1, id=size.id, marks=size.marks) for size in SIZES[2:]),
    ],
)
def test_thresholds_keep_what_the_filters_define(
    kind: str, device: str, dtype: torch.dtype, vocab_size: int, share: int
) -> None:
    """The interpreter gets a share of the filters, one of the dtypes, and sizes at which rows have two tiles and are
    copied."""
    index = list(LOGITS).index(kind)
    filters = FILTERS[index // 2 % share :: share]
    if device == "cpu":
        dtype = (torch.float32, torch.float16)[index % 2]
    num = len(filters)
    x = torch.randn(num, vocab_size, generator=torch.Generator(device).manual_seed(1), device=device)
    logits, rows = LOGITS[kind](x).to(dtype), torch.arange(num, device=device)
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*filters, strict=True))
    params = DrawParams(temperature.float(), top_k, top_p.float(), min_p.float(), rows, rows)
    sizes = {"tile": 1024, "capacity": 256} if device == "cpu" else {}
    kept = (logits.float() >= thresholds(logits, rows, params, **sizes)[:, None]).sum(-1).tolist()
    for row, n, (t, k, p, m) in zip(logits, kept, filters, strict=True):
        least = num_kept(row, t, k, p - NUDGE if p < 1 else p, m * (1 + NUDGE))
        most = num_kept(row, t, k, p + NUDGE if p < 1 else p, m * (1 - NUDGE))
        assert least <= n <= most, (t, k, p, m)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_without_filters_keep_everything(device: str) -> None:
    logits, rows = torch.randn(6, 3000, device=device), torch.arange(6, device=device)
    params = made(6, device)
    found = thresholds(logits, rows, params)
    assert found.isneginf().tolist() == [True, True, False] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_penalties_are_those_of_the_reference(device: str) -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 2500, generator=g).to(device)
    logits[:, 3] = float("-inf")
    counts = torch.randint(0, 4, (6, 2500), generator=g, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, (6, 2500), generator=g, dtype=torch.int32)
    counts, rows = counts.to(device), torch.tensor([5, 0, 2, 2], device=device)
    columns = torch.tensor([[1.0, 1.3, 1.0, 0.8], [0.0, 0.2, 0.5, 0.0], [0.0, -0.3, 0.0, 1.0]], device=device)
    expected = logits.clone()
    reference.penalize(expected, counts, rows, *columns)
    assert torch.equal(expected[0], logits[0])
    kernel.penalize(logits, counts, rows, *columns)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_a_step_without_choices_launches_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert kernel.sample(torch.zeros(3, 100), none, None, False).shape == (0,)
    kernel.penalize(torch.empty(0, 100), torch.zeros(3, 100, dtype=torch.int32), none, none, none, none)
