"""kv_write as a Triton kernel: a program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.fp8_kv.kernel import inverse_of, scale_for
from baton_kernels.pdl import launch_options


@triton.jit
def store_quantized(
    cache_ptr, place, offset, elements, mask, head_mask, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store rows, each all of one head of a token, and their scales. elements: [rows, dims]; place: [rows, 1], offsets
    of their heads in the cache; offset: of the token in its block; head_mask: [rows, 1]."""
    x = elements.to(tl.float32)
    scale = scale_for(tl.max(tl.abs(x), axis=1))[:, None]
    dim = tl.arange(0, elements.shape[1])[None, :]
    stored = (x * inverse_of(scale)).to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + place + offset * HEAD_DIM + dim, stored, mask=mask)
    store_scale(cache_ptr, place, offset, scale, head_mask, BLOCK_SIZE, HEAD_DIM)


@triton.jit
def store_scale(cache_ptr, place, offset, scale, head_mask, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store the scales, [rows, 1] int32, behind the elements of the rows' heads."""
    scale_ptr = cache_ptr.to(tl.pointer_type(tl.uint8))
    tl.store(scale_ptr + place + BLOCK_SIZE * HEAD_DIM + offset, scale.to(tl.uint8), mask=head_mask)


@triton.jit
def _kv_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, NUM_HEADS_PADDED)[:, None]
    dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    key_offsets = token * key_token_stride + head * key_head_stride + dim * key_dim_stride
    value_offsets = token * value_token_stride + head * value_head_stride + dim * value_dim_stride
    key = tl.load(key_ptr + key_offsets, mask=mask, other=0.0)
    value = tl.load(value_ptr + value_offsets, mask=mask, other=0.0)
    place = (slot // BLOCK_SIZE) * cache_block_stride + head * cache_head_stride
    offset = slot % BLOCK_SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if key_cache_ptr.dtype.element_ty == tl.float8e4nv:
        known = head < NUM_HEADS
        store_quantized(key_cache_ptr, place, offset, key, mask, known, BLOCK_SIZE, HEAD_DIM)
        store_quantized(value_cache_ptr, place, offset, value, mask, known, BLOCK_SIZE, HEAD_DIM)
    else:
        place += offset * cache_slot_stride + dim
        tl.store(key_cache_ptr + place, key, mask=mask)
        tl.store(value_cache_ptr + place, value, mask=mask)


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    block_stride, head_stride, slot_stride, _ = key_cache.stride()
    _kv_write_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value.stride(0),
        value.stride(1),
        value.stride(2),
        block_stride,
        head_stride,
        slot_stride,
        num_heads,
        triton.next_power_of_2(num_heads),
        head_dim,
        triton.next_power_of_2(head_dim),
        key_cache.shape[2],
        num_warps=4,
        **launch_options(key.device),
    )
