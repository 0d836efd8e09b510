"""What the tests of experts have in common: where they run, weights, who chooses whom, and how exact results are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.experts import ExpertWeights, on_gpu, reference
from tests.kernels.poison import poisoned

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
RELATIVE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The largest difference in a row, over the row's largest value."""


def choices(num_tokens: int, top_k: int, num_experts: int, device: str) -> tuple[Tensor, Tensor]:
    """ids and weights."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return ids.to(device), (torch.rand(num_tokens, top_k) + 0.1).to(device)


def weights_of(
    num_experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, clamped: bool = False
) -> ExpertWeights:
    """Of gpt-oss's form if clamped."""

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes) * sizes[-1] ** -0.5).to(device, dtype)

    plain = ExpertWeights(drawn(num_experts, 2 * width, hidden), drawn(num_experts, hidden, width))
    if not clamped:
        return plain
    biased = replace(plain, gate_up_bias=4 * drawn(num_experts, 2 * width), down_bias=drawn(num_experts, hidden))
    return replace(biased, gate="clamped", interleaved=True, limit=1.5)


def in_four_bits(of: ExpertWeights) -> ExpertWeights:
    """Random ones of the same sizes in MXFP4."""

    def drawn(weight: Tensor) -> tuple[Tensor, Tensor]:
        sizes, columns = weight.shape[:2], weight.shape[2]
        codes = torch.randint(0, 256, (*sizes, columns // 2), dtype=torch.uint8)
        return codes.to(weight.device), torch.randint(120, 125, (*sizes, columns // 32)).byte().to(weight.device)

    (gate_up, gate_up_scale), (down, down_scale) = drawn(of.gate_up), drawn(of.down)
    return replace(of, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def check(out: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    largest = expected.float().abs().amax(-1)
    assert ((out.float() - expected.float()).abs().amax(-1) <= factor * RELATIVE[out.dtype] * largest).all()


def check_products(of: ExpertWeights, x: Tensor) -> None:
    """The kernels' result for three of six experts, with a choice of no expert, without padding and with some."""
    num_tokens, device, dtype = len(x), x.device.type, x.dtype
    ids, weights = choices(num_tokens, 3, 6, device)
    ids[-1, 1] = 6
    slots = (torch.arange(num_tokens, device=device) + num_tokens) % 3
    with poisoned():
        out = on_gpu(x, ids, weights.to(dtype), of, None)
        padded = on_gpu(x, ids, weights.to(dtype), of, slots)
    expected = reference.experts(x, ids, weights.to(dtype), of)
    check(out, expected)
    check(padded, expected * (slots > 0)[:, None].to(dtype))
