"""Keys and values in 8 bits: float8_e4m3fn, with a scale for each token and head of K, and of V.

Scales are powers of two (float8_e8m0fnu, as in the OCP Microscaling Formats specification 1.0): the smallest with which
the largest magnitude fits. So no calibration is needed, and a token's stored KV depends on that token alone: not on how
its prompt was chunked, nor on the other tokens of its block. A power of two costs e4m3 no precision, and dequantizing
is exact in bfloat16, wherever it happens.

In a cache, a head's `[block_size, head_dim]` elements are followed by its `block_size` scales, one byte each.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
_LARGEST_SCALE = 247
"""The scale, as e8m0, for the largest fp32: its exponent minus the 8 of 448."""
_BEYOND_448 = 0x1FFFFF
"""Added to a float's bits, carries into the exponent exactly if the mantissa exceeds 1.75, that of 448."""


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache of keys or values has scales."""
    return cache.dtype == DTYPE


def head_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of one head's elements and scales in one block: the stride of heads in a quantized cache."""
    return block_size * (head_dim + 1)


def head_stride(cache: Tensor) -> int:
    """Elements between one head's piece of a block and the next, in a cache [num_blocks, num_kv_heads, block_size,
    head_dim]. torch may give a single head any stride."""
    block_size, head_dim = cache.shape[2:]
    return head_bytes(block_size, head_dim) if is_quantized(cache) else block_size * head_dim


def elements_of(memory: Tensor, block_size: int, head_dim: int) -> Tensor:
    """The elements in memory [..., head_bytes], uint8, of quantized heads: a view [..., block_size, head_dim]."""
    elements = memory[..., : block_size * head_dim].view(DTYPE)
    found: Tensor = elements.unflatten(-1, (block_size, head_dim))  # type: ignore[no-untyped-call]
    return found


def scales_of(cache: Tensor) -> Tensor:
    """The scales of a quantized cache [num_blocks, num_kv_heads, block_size, head_dim], as e8m0 bytes: a view
    [num_blocks, num_kv_heads, block_size], uint8, of the same memory."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    strides = (cache.stride(0), head_stride(cache), 1)
    offset = cache.storage_offset() + block_size * head_dim
    return cache.view(torch.uint8).as_strided((num_blocks, num_kv_heads, block_size), strides, offset)


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize heads, [..., head_dim], of a floating dtype. Returns float8_e4m3fn of the same shape, and the scales,
    [...], uint8."""
    exact = heads.float()
    peak = exact.abs().amax(-1)
    scales = (((peak.view(torch.int32) + _BEYOND_448) >> 23) - 8).clamp(1, _LARGEST_SCALE)
    inverse = ((254 - scales) << 23).view(torch.float32)
    return (exact * inverse[..., None]).to(DTYPE), scales.to(torch.uint8)


def dequantize(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that `quantize` stored, in `dtype`: exact in float32, and in bfloat16 except for the tiniest
    numbers."""
    factors = (scales.int() << 23).view(torch.float32)
    return (elements.float() * factors[..., None]).to(dtype)
