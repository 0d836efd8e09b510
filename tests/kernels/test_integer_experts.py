"""Experts of 4-bit integers with a scale and a zero per group: the reference, and the kernels against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.experts import ExpertWeights, can_compute, kernel_tokens, on_gpu, reference
from baton_kernels.experts.arranged import has_order
from baton_kernels.experts.weights import can_pack_scales, int_group, pack_scales
from tests.kernels.expert_cases import PLACES, choices
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

NUM_EXPERTS, HIDDEN = 3, 128


def drawn(width: int, groups: tuple[int, int], device: str) -> ExpertWeights:
    """groups: of gate and up, and of down. Scales and zeros that differ so much that one in the wrong place is seen."""

    def one(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (NUM_EXPERTS, rows, columns // 2), dtype=torch.uint8)
        sizes = NUM_EXPERTS, rows, columns // group
        powers = (torch.arange(NUM_EXPERTS * rows * (columns // group)).view(sizes) * 3 % 7 - 8).float().exp2()
        return codes.to(device), pack_scales(powers, torch.randint(0, 17, sizes)).to(device)

    (gate_up, gate_up_scale), (down, down_scale) = one(2 * width, HIDDEN, groups[0]), one(HIDDEN, width, groups[1])
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


@pytest.mark.parametrize(
    ("scale", "fits"), [(0.01, True), (2.0**-20, True), (1.01 * 2.0**-20, False), (60000.0, True), (70000.0, False)]
)
def test_scales_must_be_as_exact_in_fp16_as_in_bf16(scale: float, fits: bool) -> None:
    scales = torch.tensor([[0.0, 0.02], [-scale, 0.02]])
    assert can_pack_scales(scales) == fits
    assert can_pack_scales(scales[:1])


def test_a_group_has_one_scale_and_one_zero() -> None:
    codes = torch.randint(0, 256, (6, 64), dtype=torch.uint8)
    scale, zero = (
        torch.tensor([[0.5, 65504.0], [-(2.0**-24), 1.0]]).repeat(3, 1),
        torch.tensor([[0, 16], [7, 8]]).repeat(3, 1),
    )
    values = reference.values(codes, pack_scales(scale, zero), torch.float32)
    assert int_group(codes, pack_scales(scale, zero)) == 64
    for row in range(6):
        for column in range(128):
            code = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            group = column // 64
            assert values[row, column] == (code - zero[row, group]) * scale[row, group]


def test_they_are_no_other_weights_of_4_bits() -> None:
    of = drawn(64, (64, 32), "cpu")
    assert of.four_bits
    assert of.integers
    of = replace(of, gate_up_scale=torch.full((3, 128, 2), 8).int(), down_scale=torch.full((3, 128, 2), 8).int())
    assert not any((of.eight_bits, of.arranged, of.block, has_order(of)))
    assert of.expert_bytes == 128 * 64 + 128 * 32 + 4 * (128 * 2 + 128 * 2)


CASES = [
    pytest.param(num_tokens, groups, *place.values, marks=place.marks if ci or place.marks else pytest.mark.full)
    for i, num_tokens in enumerate((2, 5, 20))
    for k, groups in enumerate([(128, 96), (32, 32)])
    for j, place in enumerate(PLACES[:2] + PLACES[3:])
    for ci in [(i + k + j) % 2 == 0]
]
"""On a CPU, CI runs half of the cases, with each pair of values."""


@pytest.mark.parametrize(("num_tokens", "groups", "device", "dtype"), CASES)
def test_kernels(num_tokens: int, groups: tuple[int, int], device: str, dtype: torch.dtype) -> None:
    """Down has 96 columns, three quarters of a tile."""
    torch.manual_seed(num_tokens)
    of = drawn(96, groups, device)
    assert can_compute(of)
    x = torch.randn(num_tokens, HIDDEN).to(device, dtype)
    ids, weights = choices(num_tokens, 2, NUM_EXPERTS, device)
    weights = weights.to(dtype)
    with poisoned():
        out = on_gpu(x, ids, weights, of, None).float()
    expected = reference.experts(x.float(), ids, weights.float(), whole(of))
    error = (out - expected).norm() / expected.norm()
    assert float(error) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
def test_in_the_sizes_of_serving() -> None:
    """Qwen3-30B-A3B in AWQ or GPTQ, at all numbers of tokens for which a kernel is compiled."""
    torch.manual_seed(0)

    def one(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (128, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scale = torch.rand(128, rows, columns // 128, device="cuda") * 0.01
        return codes, pack_scales(scale, 8)

    (gate_up, gate_up_scale), (down, down_scale) = one(1536, 2048), one(2048, 768)
    of = ExpertWeights(gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale)
    for num_tokens in kernel_tokens(8, 128):
        x = torch.randn(num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
        ids, weights = choices(num_tokens, 8, 128, "cuda")
        out = on_gpu(x, ids, weights.bfloat16(), of, None).float()
        expected = reference.experts(x, ids, weights.bfloat16(), of).float()
        assert float((out - expected).norm() / expected.norm()) < 1e-2, num_tokens
