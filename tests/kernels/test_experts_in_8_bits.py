"""Experts in fp8, with a scale per row or per block of 128 x 128: the reference, and the kernels against it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.experts import ExpertWeights, can_compute, kernel_tokens, on_gpu, reference
from baton_kernels.experts.weights import BLOCK
from tests.kernels.expert_cases import PLACES, choices
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

FP8 = torch.float8_e4m3fn
NUM_EXPERTS = 3


def drawn(hidden: int, width: int, in_blocks: bool, device: str) -> ExpertWeights:
    """Scales that differ so much that one in the wrong place is seen."""

    def one(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randn(NUM_EXPERTS, rows, columns).to(FP8)
        sizes = (rows // BLOCK, columns // BLOCK) if in_blocks else (rows,)
        powers = torch.arange(NUM_EXPERTS * math.prod(sizes)).view(NUM_EXPERTS, *sizes) * 2 % 5 - 6
        return codes.to(device), powers.exp2().to(device)

    (gate_up, gate_up_scale), (down, down_scale) = one(2 * width, hidden), one(hidden, width)
    return ExpertWeights(gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def whole(of: ExpertWeights) -> ExpertWeights:
    """What they stand for, in fp32."""
    assert of.gate_up_scale is not None
    assert of.down_scale is not None
    gate_up, down = (
        torch.stack([reference.values(*one, torch.float32) for one in zip(codes, scale, strict=True)])
        for codes, scale in ((of.gate_up, of.gate_up_scale), (of.down, of.down_scale))
    )
    return ExpertWeights(gate_up, down)


def test_a_block_has_one_scale() -> None:
    codes = torch.randn(256, 384).to(FP8)
    scale = torch.rand(2, 3) + 0.5
    values = reference.values(codes, scale, torch.float32)
    for i in range(2):
        for j in range(3):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            assert torch.equal(values[block], codes[block].float() * scale[i, j])
    assert torch.equal(
        reference.values(codes, scale[:, :1].flatten().repeat(128), torch.float32)[1], codes[1].float() * scale[1, 0]
    )


CASES = [
    pytest.param(num_tokens, in_blocks, *place.values, marks=place.marks if ci or place.marks else pytest.mark.full)
    for i, num_tokens in enumerate((2, 5, 20))
    for in_blocks in (False, True)
    for j, place in enumerate(PLACES[:2] + PLACES[3:])
    for ci in [(i + in_blocks + j) % 2 == 0]
]
"""On a CPU, CI runs half of the cases, with each pair of values."""


@pytest.mark.parametrize(("num_tokens", "in_blocks", "device", "dtype"), CASES)
def test_kernels(in_blocks: bool, num_tokens: int, device: str, dtype: torch.dtype) -> None:
    """From three tokens on, x is rounded to fp8 twice; Triton's interpreter cuts off instead of rounding."""
    torch.manual_seed(num_tokens)
    of = drawn(256, 128, in_blocks, device)
    assert (of.block, of.scales_rows) == ((BLOCK, False) if in_blocks else (0, True))
    x = torch.randn(num_tokens, 256).to(device, dtype)
    ids, weights = choices(num_tokens, 2, NUM_EXPERTS, device)
    weights = weights.to(dtype)
    with poisoned():
        out = on_gpu(x, ids, weights, of, None).float()
    expected = reference.experts(x.float(), ids, weights.float(), whole(of))
    torch.testing.assert_close(reference.experts(x.float(), ids, weights.float(), of), expected)
    assert of.down_scale is not None
    moved = replace(of, down_scale=of.down_scale.roll(1, 1))
    assert (reference.experts(x.float(), ids, weights.float(), moved) - expected).norm() > 0.3 * expected.norm()
    bound = 0.01 if num_tokens <= 2 else 0.16 if device == "cpu" else 0.08
    assert (out - expected).norm() < bound * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (3072, 1536)])
def test_in_the_sizes_of_serving(hidden: int, width: int) -> None:
    of = drawn(hidden, width, True, "cuda")
    assert can_compute(of)
    plain = whole(of)
    for num_tokens in sorted({*kernel_tokens(2, NUM_EXPERTS), 3, 100, 2048}):
        x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids, weights = choices(num_tokens, 2, NUM_EXPERTS, "cuda")
        with poisoned():
            out = on_gpu(x, ids, weights.bfloat16(), of, None).float()
        expected = reference.experts(x.float(), ids, weights, plain)
        assert (out - expected).norm() < 0.08 * expected.norm(), num_tokens
