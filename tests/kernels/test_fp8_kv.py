"""Keys and values in 8 bits."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.fp8_kv import dequantize, elements_of, head_bytes, quantize, scales_of


def test_each_head_gets_the_smallest_scale_that_fits() -> None:
    peaks = torch.tensor([448.0, 448.1, 449.0, 896.0, 1.75, 1.7500001, 1e-30, 0.0, 3e38])
    heads = torch.stack([peaks, -peaks / 3], dim=-1)
    elements, scales = quantize(heads)
    assert scales.tolist() == [127, 128, 128, 128, 119, 120, 19, 1, 247]
    assert elements.float().abs().max() <= 448
    assert elements[scales > 1].float().abs().amax(-1).min() >= 224  # the next smaller one would not fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_stored_differs_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = (torch.randn(50, 3, 64) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    elements, scales = quantize(heads)
    stored = dequantize(elements, scales, torch.float32)
    peak = heads.float().abs().amax(-1, keepdim=True)
    assert ((stored - heads.float()).abs() <= heads.float().abs() / 16 + peak * 2.0**-17).all()


def test_what_is_stored_is_exact_in_bfloat16_and_stays_when_stored_again() -> None:
    torch.manual_seed(0)
    heads = torch.randn(50, 3, 64, dtype=torch.bfloat16) * 7
    elements, scales = quantize(heads)
    exact = dequantize(elements, scales, torch.float32)
    rounded = dequantize(elements, scales, torch.bfloat16)
    assert torch.equal(rounded.float(), exact)
    again, _ = quantize(rounded)
    assert torch.equal(dequantize(*quantize(rounded), torch.float32), exact)
    assert again.dtype == torch.float8_e4m3fn


def test_a_single_head_has_scales_too() -> None:
    """torch gives a dimension of size 1 any stride."""
    memory = torch.arange(3 * 36, dtype=torch.uint8).view(3, 1, 36)
    assert torch.equal(scales_of(elements_of(memory, 4, 8)), memory[..., 32:])
    assert torch.equal(scales_of(elements_of(memory.transpose(0, 1).transpose(0, 1), 4, 8)), memory[..., 32:])


def test_scales_lie_behind_the_elements_of_their_head() -> None:
    num_blocks, num_layers, num_kv_heads, block_size, head_dim = 3, 2, 2, 4, 8
    memory = torch.arange(num_blocks * num_layers * 2 * num_kv_heads * head_bytes(block_size, head_dim)) % 251
    pool = memory.to(torch.uint8).view(num_blocks, num_layers, 2, num_kv_heads, head_bytes(block_size, head_dim))
    values = elements_of(pool[:, 1, 1], block_size, head_dim)
    assert torch.equal(values.view(torch.uint8).flatten(-2), pool[:, 1, 1, :, : block_size * head_dim])
    assert torch.equal(scales_of(values), pool[:, 1, 1, :, block_size * head_dim :])
