"""Experts in MXFP4: the codes' values are transformers', and the general kernels agree with the reference."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton_kernels.experts import Routing, experts, kernel_tokens, reference, route
from baton_kernels.experts.four_bits import load_weight
from baton_kernels.experts.tiling import ROW_TOKENS
from tests.kernels.expert_cases import PLACES, check, check_products, in_four_bits, weights_of
from tests.kernels.poison import poisoned

torch.set_num_threads(1)


def all_codes() -> tuple[Tensor, Tensor]:
    """Every pair of codes with every scale but 255, which is not a number: [255, 256], [255, 16]."""
    return torch.arange(256, dtype=torch.uint8).repeat(255, 1), torch.arange(255).byte()[:, None].repeat(1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_mxfp4_are_transformers(dtype: torch.dtype) -> None:
    """Exactly, in both types. transformers returns rows as columns."""
    codes, scale = all_codes()
    expected = convert_moe_packed_tensors(codes.view(1, 255, 16, 16), scale[None], dtype=dtype)
    assert torch.equal(reference.dequantize(codes, scale, dtype), expected[0].T)
    assert expected[0, :, :253].isfinite().all()
    assert reference.dequantize(codes[:1, :16], torch.tensor([[255]], dtype=torch.uint8), dtype).isnan().all()


@triton.jit
def load_all(codes_ptr, scale_ptr, out_ptr):
    row, column = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64), tl.arange(0, 512)
    values = load_weight(codes_ptr, scale_ptr, row, 0, 512, 512, 0, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * 512 + column[None, :], values)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:])
@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter
def test_kernels_have_the_values_of_mxfp4(device: str, dtype: torch.dtype) -> None:
    """Of every code and scale, the largest and the subnormal ones, too."""
    codes, scale = (tensor.to(device) for tensor in all_codes())
    out = torch.full((255, 512), float("nan"), device=device, dtype=dtype)
    load_all[(255,)](codes, scale, out)
    assert torch.equal(out, reference.dequantize(codes, scale, dtype))


MXFP4 = [
    pytest.param(num_tokens, clamped, *place.values, marks=place.marks if ci or place.marks else pytest.mark.full)
    for i, num_tokens in enumerate((ROW_TOKENS, 13, 20))
    for clamped in (False, True)
    for j, place in enumerate(PLACES[:2] + PLACES[3:])
    for ci in [(i + clamped + j) % 2 == 0]
]
"""On a CPU, CI runs half of the cases, with each pair of values."""


@pytest.mark.parametrize(("num_tokens", "clamped", "device", "dtype"), MXFP4)
def test_experts_in_mxfp4(num_tokens: int, clamped: bool, device: str, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of the tiles'; choices of no expert; padding."""
    torch.manual_seed(num_tokens)
    of = in_four_bits(weights_of(6, 96, 160, dtype, device, clamped))
    assert (of.hidden_size, of.intermediate_size, of.expert_bytes) == (96, 160, 3 * 96 * 160 * 17 // 32)
    check_products(of, torch.randn(num_tokens, 128).to(device, dtype)[:, :96])


@pytest.mark.gpu
def test_mxfp4_in_the_sizes_of_serving() -> None:
    torch.manual_seed(0)
    of = in_four_bits(weights_of(32, 2880, 2880, torch.bfloat16, "cuda", clamped=True))
    for num_tokens in sorted({*kernel_tokens(4, 32), 2, 7, 33, 100, 2048}):
        x = torch.randn(num_tokens, 2880, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(num_tokens, 32, device="cuda")
        weights, ids = route(logits, Routing(4, "chosen_softmax"), None, torch.bfloat16)
        with poisoned():
            out = experts(x, ids, weights, of)
        check(out, reference.experts(x, ids, weights, of))
