"""kv_write as a Triton kernel: a program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.pdl import launch_options


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
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim * key_dim_stride, mask=mask)
    value = tl.load(
        value_ptr + token * value_token_stride + head * value_head_stride + dim * value_dim_stride, mask=mask
    )
    place = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride
    place += head * cache_head_stride + dim
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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
