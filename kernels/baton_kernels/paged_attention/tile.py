"""Shared by the paged attention kernels: one step of an online softmax (Milakov and Gimelshein 2018), as in
FlashAttention, over a tile of keys read through a block table.

Scores are in base 2. Without softcap they are `q.k * score_scale` with `score_scale = scale * log2(e)`; with it,
`cap * tanh(q.k * score_scale)` with `score_scale = scale / softcap` and `cap = softcap * log2(e)`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import triton
import triton.language as tl

from baton_kernels.fp8_kv.kernel import dequantized, load_factors

LOG2_E = math.log2(math.e)
NOTHING = tl.constexpr(-1.0e30)  # the peak of no scores: finite, as inf - inf is a NaN


@triton.jit
def attend_tile(
    out,  # [ROWS, HEAD_DIM_PADDED], fp32, not yet divided by `total`
    total,  # [ROWS], the sum of weights
    peak,  # [ROWS], the highest score
    query,  # [ROWS, HEAD_DIM_PADDED]
    positions,  # [ROWS], read when CAUSAL
    key_ptr,  # of the KV head
    value_ptr,
    table_ptr,  # of the sequence
    block_stride,
    first,  # the tile's first key; only keys in [visible_from, visible_end) are read, others may have no block
    visible_from,
    visible_end,
    score_scale,
    cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    dim = tl.arange(0, query.shape[1])[None, :]
    key_index = first + tl.arange(0, TILE_KEYS)
    there = (key_index >= visible_from) & (key_index < visible_end)
    if BLOCK_SIZE % TILE_KEYS == 0:  # the tile lies in one block
        block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
    elif MASKED:
        block = tl.load(table_ptr + key_index // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key_index // BLOCK_SIZE).to(tl.int64)
    offset = key_index % BLOCK_SIZE
    offsets = (block * block_stride + offset * HEAD_DIM)[:, None] + dim
    load_mask = dim < HEAD_DIM
    if MASKED:  # an unused slot may hold anything, including a NaN, which survives a weight of zero
        load_mask = load_mask & there[:, None]
    if MASKED or query.shape[1] != HEAD_DIM:
        key = tl.load(key_ptr + offsets, mask=load_mask, other=0.0)
    else:
        key = tl.load(key_ptr + offsets)
    if key_ptr.dtype.element_ty == tl.float8e4nv:
        factors = load_factors(key_ptr, block * block_stride, offset, there, BLOCK_SIZE, HEAD_DIM)
        key = dequantized(key, factors[:, None], query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
    if HAS_CAP:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    if MASKED:
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (key_index[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen = seen & (key_index[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, NOTHING)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    if MASKED or query.shape[1] != HEAD_DIM:
        value = tl.load(value_ptr + offsets, mask=load_mask, other=0.0)
    else:
        value = tl.load(value_ptr + offsets)
    if value_ptr.dtype.element_ty == tl.float8e4nv:
        factors = load_factors(value_ptr, block * block_stride, offset, there, BLOCK_SIZE, HEAD_DIM)
        value = dequantized(value, factors[:, None], query.dtype)
    out = tl.dot(weights.to(value.dtype), value, out * decay[:, None], input_precision="ieee")
    return out, total, new_peak


@triton.jit
def add_sink(out, total, peak, sink):
    """Add a score that takes part in the softmax but has no value."""
    score = sink.to(tl.float32) * 1.4426950408889634
    new_peak = tl.maximum(peak, score)
    decay = tl.exp2(peak - new_peak)
    return out * decay[:, None], total * decay + tl.exp2(score - new_peak), new_peak


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer computes scores from products: `score_scale` and `cap` as above, `cap` only if `has_cap`. window: how
    many keys a token sees, including its own; None: all up to its own."""

    score_scale: float
    cap: float
    has_cap: bool
    window: int | None


@functools.lru_cache(maxsize=256)
def scoring(scale: float, sliding_window: int | None, softcap: float | None) -> Scoring:
    """The scoring for arguments of `paged_attention`, which repeat in every step of a model."""
    if softcap is None:
        return Scoring(scale * LOG2_E, 0.0, False, sliding_window)
    return Scoring(scale / softcap, softcap * LOG2_E, True, sliding_window)
