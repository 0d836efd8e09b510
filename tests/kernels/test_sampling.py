"""The draw: noise that is uniform and independent, filters against a plain Python oracle, and draws that depend on
nothing but their own row."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton_kernels.sampling import DrawParams, reference, sample

torch.set_num_threads(1)


def params(num_rows: int, **columns: object) -> DrawParams:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, **columns}
    whole = {"top_k", "seed", "position"}
    return DrawParams(
        **{
            name: torch.as_tensor(value, dtype=torch.int64 if name in whole else torch.float32).expand(num_rows)
            for name, value in plain.items()
        }
    )


def draw(logits: Tensor, chosen: DrawParams, *, filtered: bool = True) -> Tensor:
    """Choice i from row i."""
    return sample(logits, torch.arange(logits.shape[0]), chosen, filtered=filtered)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations above its mean: below 5 for a sound generator, whatever the seed."""
    freedom = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


# ---- noise ----


def bits_of(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """[num_rows, vocab_size], the unsigned 32 bits that noise is made of."""
    first, second = reference._keys(seed, position)
    tokens = torch.arange(vocab_size, dtype=torch.int32)
    return reference._hash(first[:, None], second[:, None], tokens).long() & 0xFFFFFFFF


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "high seeds"])
@pytest.mark.parametrize("shift", [0, 12, 23])
def test_bits_are_uniform_along_every_axis(axis: str, shift: int) -> None:
    many = torch.arange(1 << 17)
    zeros = torch.zeros_like(many)
    seed, position, vocab = {
        "tokens": (zeros[:1], zeros[:1], 1 << 17),
        "positions": (zeros, many, 1),
        "seeds": (many, zeros, 1),
        "high seeds": (many << 32, zeros, 1),
    }[axis]
    bits = bits_of(seed, position, vocab).flatten()
    assert bits.unique().numel() > 0.9999 * bits.numel()
    counts = torch.bincount(bits >> shift & 0xFF, minlength=256).float()
    assert chi_square(counts, torch.full((256,), bits.numel() / 256)) < 5
    neighbours = (bits[:-1] >> shift & 0xF) * 16 + (bits[1:] >> shift & 0xF)
    pairs = torch.bincount(neighbours, minlength=256).float()
    assert chi_square(pairs, torch.full((256,), neighbours.numel() / 256)) < 5


def test_noise_is_finite_and_has_the_gumbel_distribution() -> None:
    noise = reference.gumbel_noise(torch.arange(64), torch.arange(64), 4096).flatten().double()
    assert bool(noise.isfinite().all())
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_the_largest_and_smallest_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 0x7FFFFFFF, -1]], dtype=torch.int32)
    monkeypatch.setattr(reference, "_hash", lambda *_: extremes)
    assert bool(reference.gumbel_noise(torch.tensor([0]), torch.tensor([0]), 3).isfinite().all())


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def hash_one(seed: int, position: int, token: int) -> int:
    """The same function in plain integers."""
    keys = []
    for key in (0x243F6A88, 0x13198A2E):
        for word in (seed % 2**32, seed % 2**64 >> 32, position):
            key = mix(((key ^ word) + 0x9E3779B9) % 2**32)
        keys.append(key)
    return mix((mix(token * 0x9E3779B1 % 2**32 ^ keys[0]) + keys[1]) % 2**32)


def test_the_noise_is_this_function_of_seed_position_and_token() -> None:
    """Written out in plain integers: any node, on any device, must draw the same."""
    rows = [(0, 0), (1, 7), (2**63 - 1, 4095), (2**64 - 1, 123456)]
    seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed, _ in rows])
    bits = bits_of(seeds, torch.tensor([position for _, position in rows]), 3)
    assert bits.tolist() == [[hash_one(seed, position, token) for token in range(3)] for seed, position in rows]


def test_the_noise_at_a_position_is_this() -> None:
    """Values, not a formula: a node that computes them otherwise, or for a position beside, goes on with another text
    than the node before it."""
    bits = bits_of(torch.tensor([5, 5, 5]), torch.tensor([0, 1, 1000]), 2)
    assert bits.tolist() == [[767624203, 367983197], [2168940119, 244455021], [952641900, 964714156]]
    logits = torch.zeros(4, 1000)
    tokens = draw(logits, params(4, seed=5, position=[0, 1, 2, 1000]), filtered=False)
    assert tokens.tolist() == [898, 510, 671, 198]


# ---- draws ----


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 0.5])
    n = 40_000
    tokens = draw(logits.expand(n, -1), params(n, temperature=1.3, position=torch.arange(n)), filtered=False)
    counts = torch.bincount(tokens, minlength=6).float()
    assert chi_square(counts, (logits / 1.3).softmax(-1) * n) < 5


def test_a_draw_depends_on_its_own_row_alone() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(8, 100), range(8)
    columns: dict[str, list[Any]] = {
        "temperature": [0.2, 0.7, 1.0, 1.5, 0.0, 1.0, 1.0, 0.9],
        "top_k": [0, 5, 0, 3, 1, 0, 1000, 2],
        "top_p": [1.0, 0.9, 0.3, 1.0, 0.5, 1e-6, 1.0, 0.8],
        "min_p": [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 1.0, 0.05],
        "seed": [0, 1, -1, 2**62, 5, 5, 5, 9],
        "position": [0, 1, 2, 3, 4, 4, 5, 6],
    }
    batch = draw(logits, params(8, **columns))
    for i in rows:
        own = params(1, **{name: [values[i]] for name, values in columns.items()})
        assert draw(logits[[i]], own) == batch[i]


def test_rows_are_drawn_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, chosen = torch.randn(5, 300), params(5, seed=torch.arange(5), position=3)
    together = draw(logits, chosen, filtered=False)
    monkeypatch.setattr(reference, "_IN_CACHE", 700)
    assert torch.equal(draw(logits, chosen, filtered=False), together)


@pytest.mark.parametrize("spread", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_draw_is_the_largest_logit_with_the_noise_of_each_token(top_k: int, spread: float) -> None:
    """Whichever tokens get any: a filter changes nothing for those it keeps."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(3)) * spread
    chosen = params(200, top_k=top_k, seed=torch.arange(200), position=torch.arange(200))
    noisy = logits + reference.gumbel_noise(chosen.seed, chosen.position, 50)
    if top_k:
        noisy[logits < logits.topk(top_k).values[:, -1:]] = float("-inf")
    assert torch.equal(draw(logits, chosen, filtered=bool(top_k)), noisy.argmax(dim=-1).int())


def test_no_noise_exceeds_what_is_reckoned_with() -> None:
    assert 22.18 < float(reference._gumbel(torch.tensor([0], dtype=torch.int32))) < reference._MOST_NOISE


def test_an_infinite_logit_is_drawn() -> None:
    logits = torch.zeros(1, 9)
    logits[0, 4] = float("inf")
    assert draw(logits, params(1), filtered=False).tolist() == [4]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((1000, 50), float("-inf"))
    logits[:, 31], logits[:, 7] = -30.0, 5.0
    tokens = draw(logits, params(1000, temperature=100.0, position=torch.arange(1000)), filtered=False)
    assert set(tokens.tolist()) == {7, 31}


def allowed(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """min_p, then top_k, then top_p, each in its textbook form."""
    best = max(logits)
    weights = {i: math.exp((x - best) / temperature) for i, x in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= min_p}
    ordered = sorted(weights, key=lambda i: -weights[i])
    if top_k:
        ordered = ordered[:top_k]
    total, mass, kept = sum(weights[i] for i in ordered), 0.0, set()
    for i in ordered:
        if mass / total < top_p:
            kept.add(i)
        mass += weights[i]
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.3, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4]),
)
def test_filters_keep_what_the_textbook_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 2
    scores = (logits - logits.max()) / temperature
    threshold = reference._threshold(
        scores[None], params(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), top_k or 10
    )
    kept = set((scores >= threshold).nonzero()[:, 0].tolist())
    expected = allowed(logits.tolist(), temperature, top_k, top_p, min_p)
    # A boundary hit exactly may round either way.
    nudged = [allowed(logits.tolist(), temperature, top_k, top_p + d, min_p * (1 - d)) for d in (-1e-5, 1e-5)]
    assert kept in [expected, *nudged]


def test_filters_off_keep_everything_and_ties_stay_together() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -60.0]])
    keep = [int((scores >= reference._threshold(scores, params(1, top_k=k), 4)).sum()) for k in (0, 1, 2, 3, 4)]
    assert keep == [4, 1, 3, 3, 4]


def test_filtered_draws_follow_the_renormalised_softmax() -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 0.5]), 20_000
    tokens = draw(logits.expand(n, -1), params(n, top_k=4, top_p=0.95, seed=torch.arange(n)))
    kept = sorted(allowed(logits.tolist(), 1.0, 4, 0.95, 0.0))
    counts = Counter(tokens.tolist())
    assert sorted(counts) == kept
    expected = logits[kept].softmax(-1) * n
    assert chi_square(torch.tensor([counts[i] for i in kept]).float(), expected) < 5
