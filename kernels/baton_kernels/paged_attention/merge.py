"""Merges attention over parts of the keys: each part's output is weighted by its sum of softmax weights."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.paged_attention.tile import NOTHING


@triton.jit(do_not_specialize=["first_seq", "num_splits"])
def merge_splits_kernel(
    part_ptr,  # [num_seqs, num_splits, max_tiles, NUM_KV_HEADS, TILE_ROWS, HEAD_DIM], fp32, only parts with keys
    part_lse_ptr,  # the same without HEAD_DIM, base 2, NOTHING where there are no keys
    sink_ptr,
    out_ptr,
    query_start_ptr,
    first_seq,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A program merges ROWS rows of one of the prefill kernel's tiles: in a CUDA graph most tiles have none, and a
    program for each row would spend more time on starting programs than on merging."""
    seq = tl.program_id(2)
    first_token = tl.load(query_start_ptr + first_seq + seq)
    length = tl.load(query_start_ptr + first_seq + seq + 1) - first_token
    tile, head = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS
    first_row = tl.program_id(0) * ROWS
    if tile * TILE_ROWS + first_row < length * GROUP:
        row_of_tile = first_row + tl.arange(0, ROWS)
        row = tile * TILE_ROWS + row_of_tile
        there = row < length * GROUP
        token = (first_token + row // GROUP).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        split = tl.arange(0, SPLITS_PADDED)
        dim = tl.arange(0, HEAD_DIM_PADDED)
        part_stride = tl.num_programs(1) * TILE_ROWS  # from one split to the next
        part = (seq * num_splits * tl.num_programs(1) + tl.program_id(1)) * TILE_ROWS + row_of_tile
        lse_mask = there[:, None] & (split < num_splits)[None, :]
        lse = tl.load(part_lse_ptr + part[:, None] + split[None, :] * part_stride, mask=lse_mask, other=NOTHING)
        peak = tl.max(lse, 1)
        if HAS_SINKS:
            sink = tl.load(sink_ptr + query_head).to(tl.float32) * 1.4426950408889634
            peak = tl.maximum(peak, sink)
        total = tl.sum(tl.where(lse > NOTHING, tl.exp2(lse - peak[:, None]), 0.0), 1)
        total = tl.where(there, total, 1.0)
        if HAS_SINKS:
            total += tl.exp2(sink - peak)
        num_used = tl.max(tl.max(tl.where(lse > NOTHING, split[None, :] + 1, 0), 1), 0)
        out = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
        for _ in range(num_used):
            own_lse = tl.load(part_lse_ptr + part, mask=there, other=NOTHING)
            has_keys = own_lse > NOTHING
            mask = has_keys[:, None] & (dim < HEAD_DIM)[None, :]
            parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
            out += parts * tl.where(has_keys, tl.exp2(own_lse - peak), 0.0)[:, None]
            part += part_stride
        place = token * NUM_KV_HEADS * GROUP + query_head
        out_mask = there[:, None] & (dim < HEAD_DIM)[None, :]
        out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place[:, None] * HEAD_DIM + dim[None, :], out, mask=out_mask)


@triton.jit(do_not_specialize=["num_rows", "first_token", "lse_head_stride", "other_lse_head_stride"])
def _merge_pair_kernel(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    num_rows,
    first_token,
    out_token_stride,
    out_head_stride,
    lse_head_stride,
    other_token_stride,
    other_head_stride,
    other_lse_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token, head = (row // NUM_HEADS).to(tl.int64), row % NUM_HEADS
    dim = tl.arange(0, HEAD_DIM_PADDED)
    there = row < num_rows
    mask = there[:, None] & (dim < HEAD_DIM)[None, :]
    out_token = first_token + token
    out_offsets = (out_token * out_token_stride + head * out_head_stride)[:, None] + dim[None, :]
    lse_offsets = head * lse_head_stride + out_token
    other_offsets = (token * other_token_stride + head * other_head_stride)[:, None] + dim[None, :]
    lse = tl.load(lse_ptr + lse_offsets, mask=there, other=0.0)
    other_lse = tl.load(other_lse_ptr + head * other_lse_head_stride + token, mask=there, other=0.0)
    out = tl.load(out_ptr + out_offsets, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + other_offsets, mask=mask, other=0.0).to(tl.float32)
    peak = tl.maximum(lse, other_lse)
    weight, other_weight = tl.exp(lse - peak), tl.exp(other_lse - peak)
    total = weight + other_weight
    merged = out * (weight / total)[:, None] + other * (other_weight / total)[:, None]
    tl.store(out_ptr + out_offsets, merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + lse_offsets, peak + tl.log(total), mask=there)


def merge_pair(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, first_token: int = 0, num_tokens: int | None = None
) -> None:
    """Merge the first `num_tokens` (default: all) tokens of `other` into `out` from `first_token` on; likewise lse.

    out, other: [num_tokens, num_heads, head_dim], the last dimension contiguous. lse, other_lse: [num_heads,
    num_tokens], fp32, natural log, the last dimension contiguous. The numbers of tokens may differ.
    """
    num_heads, head_dim = out.shape[1:]
    assert out.stride(2) == other.stride(2) == 1
    assert lse.stride(1) == other_lse.stride(1) == 1
    dim_padded = triton.next_power_of_2(head_dim)
    tile_rows = max(1, 4096 // dim_padded)
    num_rows = (other.shape[0] if num_tokens is None else num_tokens) * num_heads
    _merge_pair_kernel[(triton.cdiv(num_rows, tile_rows),)](
        out,
        lse,
        other,
        other_lse,
        num_rows,
        first_token,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        other.stride(0),
        other.stride(1),
        other_lse.stride(0),
        num_heads,
        head_dim,
        tile_rows,
        dim_padded,
        num_warps=8,
    )
