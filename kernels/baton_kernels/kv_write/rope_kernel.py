"""rope_kv_write as a Triton kernel.

A program handles one token and a few of its heads, either of the query or of the key and value: 40 heads of 128 make 5
programs of 2 warps, enough to fill a GPU at 64 decodes and small enough for low latency at one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.fp8_kv.kernel import inverse_of, scale_for
from baton_kernels.kv_write.kernel import store_quantized, store_scale
from baton_kernels.kv_write.reference import HeadNorm
from baton_kernels.pdl import launch_options

ELEMENTS = 1024  # of heads per program: 2 warps, 8 elements of each half per thread, 16-byte accesses


@triton.jit
def _head_norm(
    x,
    y,
    rest,
    weight_ptr,
    first,
    second,
    beyond,
    pair_mask,
    rest_mask,
    eps,
    offset,
    HEAD_DIM: tl.constexpr,
    HAS_REST: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Normalise heads given as the two halves of the rotated part and the rest. Takes fp32, returns rounded values as
    fp32."""
    total = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
    if HAS_REST:
        total += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(total * (1.0 / HEAD_DIM) + eps)[:, None]
    x = _weighted(x * scale, weight_ptr + first, pair_mask, offset, ROUND_ONCE, DTYPE)
    y = _weighted(y * scale, weight_ptr + second, pair_mask, offset, ROUND_ONCE, DTYPE)
    if HAS_REST:
        rest = _weighted(rest * scale, weight_ptr + beyond, rest_mask, offset, ROUND_ONCE, DTYPE)
    return x, y, rest


@triton.jit
def _weighted(x, weight_ptrs, mask, offset, ROUND_ONCE: tl.constexpr, DTYPE: tl.constexpr):
    weight = tl.load(tl.broadcast_to(weight_ptrs, x.shape), mask=mask, other=0.0).to(tl.float32) + offset
    if not ROUND_ONCE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _turned(
    heads_ptr,
    weight_ptr,
    cos,
    sin,
    head,
    head_stride,
    eps,
    offset,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
):
    """Norm and rotate `head`, [heads, 1], of one token in place; return both halves and the rest, in the dtype."""
    DTYPE: tl.constexpr = heads_ptr.dtype.element_ty
    HAS_REST: tl.constexpr = ROTARY_DIM < HEAD_DIM
    pair = tl.arange(0, HALF_PADDED)[None, :]
    first, second = pair, pair + ROTARY_DIM // 2
    if INTERLEAVED:
        first, second = pair * 2, pair * 2 + 1
    beyond = ROTARY_DIM + tl.arange(0, REST_PADDED)[None, :]
    pair_mask = (head < NUM_HEADS) & (pair < ROTARY_DIM // 2)
    rest_mask = (head < NUM_HEADS) & (beyond < HEAD_DIM)
    row = heads_ptr + head * head_stride
    x = tl.load(row + first, mask=pair_mask, other=0.0).to(tl.float32)
    y = tl.load(row + second, mask=pair_mask, other=0.0).to(tl.float32)
    rest = x
    if HAS_REST:
        rest = tl.load(row + beyond, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x, y, rest = _head_norm(
            x,
            y,
            rest,
            weight_ptr,
            first,
            second,
            beyond,
            pair_mask,
            rest_mask,
            eps,
            offset,
            HEAD_DIM,
            HAS_REST,
            ROUND_ONCE,
            DTYPE,
        )
        if HAS_REST:
            tl.store(row + beyond, rest.to(DTYPE), mask=rest_mask)
    a, b = (x * cos - y * sin).to(DTYPE), (y * cos + x * sin).to(DTYPE)
    tl.store(row + first, a, mask=pair_mask)
    tl.store(row + second, b, mask=pair_mask)
    return a, b, rest.to(DTYPE), first, second, beyond, pair_mask, rest_mask


@triton.jit
def _rope_kv_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_token_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    eps,
    weight_offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERY_GROUPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF_PADDED)[None, :]
    # Each head loads these again, from L1: a single row would have another layout, and converting it takes barriers.
    column = tl.broadcast_to(pair * 2 if INTERLEAVED else pair, (HEADS, HALF_PADDED))
    known = column < ROTARY_DIM if INTERLEAVED else column < ROTARY_DIM // 2
    cos = tl.load(cos_ptr + token * cos_token_stride + column, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * cos_token_stride + column, mask=known, other=0.0).to(tl.float32)
    if group < QUERY_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        _turned(
            query_ptr + token * query_token_stride,
            q_weight_ptr,
            cos,
            sin,
            head,
            query_head_stride,
            eps,
            weight_offset,
            NUM_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            HALF_PADDED,
            REST_PADDED,
            INTERLEAVED,
            HAS_NORM,
            ROUND_ONCE,
        )
    else:
        head = (group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
        a, b, rest, first, second, beyond, pair_mask, rest_mask = _turned(
            key_ptr + token * key_token_stride,
            k_weight_ptr,
            cos,
            sin,
            head,
            key_head_stride,
            eps,
            weight_offset,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            HALF_PADDED,
            REST_PADDED,
            INTERLEAVED,
            HAS_NORM,
            ROUND_ONCE,
        )
        slot = tl.load(slot_ptr + token)
        home = (slot // BLOCK_SIZE) * cache_block_stride + head * cache_head_stride
        offset = slot % BLOCK_SIZE
        place = home + offset * cache_slot_stride
        head_mask = head < NUM_KV_HEADS
        if key_cache_ptr.dtype.element_ty == tl.float8e4nv:
            peak = tl.maximum(tl.max(tl.abs(a.to(tl.float32)), axis=1), tl.max(tl.abs(b.to(tl.float32)), axis=1))
            if ROTARY_DIM < HEAD_DIM:
                peak = tl.maximum(peak, tl.max(tl.abs(rest.to(tl.float32)), axis=1))
            scale = scale_for(peak)[:, None]
            store_scale(key_cache_ptr, home, offset, scale, head_mask, BLOCK_SIZE, HEAD_DIM)
            a, b = a.to(tl.float32) * inverse_of(scale), b.to(tl.float32) * inverse_of(scale)
            rest = rest.to(tl.float32) * inverse_of(scale)
        stored: tl.constexpr = key_cache_ptr.dtype.element_ty
        tl.store(key_cache_ptr + place + first, a.to(stored), mask=pair_mask)
        tl.store(key_cache_ptr + place + second, b.to(stored), mask=pair_mask)
        if ROTARY_DIM < HEAD_DIM:
            tl.store(key_cache_ptr + place + beyond, rest.to(stored), mask=rest_mask)
        dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
        mask = head_mask & (dim < HEAD_DIM)
        value_offsets = token * value_token_stride + head * value_head_stride + dim
        value = tl.load(value_ptr + value_offsets, mask=mask, other=0.0)
        if key_cache_ptr.dtype.element_ty == tl.float8e4nv:
            store_quantized(value_cache_ptr, home, offset, value, mask, head_mask, BLOCK_SIZE, HEAD_DIM)
        else:
            tl.store(value_cache_ptr + place + dim, value, mask=mask)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


class Tiling(NamedTuple):
    """heads: per program. query_groups, groups: programs per token for the query's heads, and for all heads. padded,
    half, rest: powers of 2 that hold a head, half of its rotated part, and its unrotated part."""

    heads: int
    query_groups: int
    groups: int
    padded: int
    half: int
    rest: int


@functools.lru_cache(maxsize=256)
def choose(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> Tiling:
    padded = triton.next_power_of_2(head_dim)
    heads = max(1, ELEMENTS // padded)
    query_groups = triton.cdiv(num_heads, heads)
    return Tiling(
        heads=heads,
        query_groups=query_groups,
        groups=query_groups + triton.cdiv(num_kv_heads, heads),
        padded=padded,
        half=triton.next_power_of_2(rotary_dim // 2),
        rest=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
    )


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    norm: HeadNorm | None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    num_kv_heads, rotary_dim = key.shape[1], cos.shape[1]
    tiling = choose(num_heads, num_kv_heads, head_dim, rotary_dim)
    block_stride, head_stride, slot_stride, _ = key_cache.stride()
    q_weight, k_weight, eps, weight_offset, round_once = norm or (cos, cos, 0.0, 0.0, False)
    _rope_kv_write_kernel[(num_tokens, tiling.groups)](
        query, key, value, cos, sin, q_weight, k_weight, key_cache, value_cache, slot_mapping,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        cos.stride(0), block_stride, head_stride, slot_stride, eps, weight_offset,
        num_heads, num_kv_heads, head_dim, tiling.padded, rotary_dim, tiling.half, tiling.rest, key_cache.shape[2],
        tiling.heads, tiling.query_groups, interleaved, norm is not None, round_once,
        num_warps=2, **launch_options(key.device),
    )  # fmt: skip
