"""Decode attention: one new token per sequence, its context split over programs (flash-decoding, Dao et al. 2023).

A program has one KV head of one sequence and a share of its keys; the query heads of that KV head are the rows of its
tile. How many shares a sequence has is computed on the device from its length, so that a CUDA graph serves any.

A second kernel merges the shares. On an H200 the other way, the last program of a sequence to finish merges them, took
7.1 us a layer against 5.9 at batch 1 and 51 against 39 at 32 sequences of 1024.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.tile import NOTHING, add_sink, attend_tile, num_sms, score_constants

MAX_SPLITS = 64


@triton.jit(do_not_specialize=["window", "num_splits", "min_share", "table_stride"])
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    row_ptr,
    context_ptr,
    sink_ptr,
    score_scale,
    cap,
    window,
    num_splits,
    min_share,
    query_token_stride,
    query_head_stride,
    block_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + seq)
    table_row = tl.load(row_ptr + seq).to(tl.int64)
    visible_from = 0
    if HAS_WINDOW:
        visible_from = tl.maximum(context - window, 0)
    base, share, num_shares = _num_shares(context, window, num_splits, min_share, TILE_KEYS, HAS_WINDOW)
    if split < tl.maximum(num_shares, 1):  # a padding entry has no tiles; its first program writes zeros
        start = base + split * share * TILE_KEYS
        end = tl.minimum(context, start + share * TILE_KEYS)
        row = tl.arange(0, TILE_ROWS)
        dim = tl.arange(0, HEAD_DIM_PADDED)
        mask = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
        query_offsets = (head * GROUP + row)[:, None] * query_head_stride + dim[None, :]
        query = tl.load(query_ptr + seq * query_token_stride + query_offsets, mask=mask, other=0.0)
        out = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], NOTHING, tl.float32)
        head_offset = head * BLOCK_SIZE * HEAD_DIM
        for first in range(start, end, TILE_KEYS):
            out, total, peak = attend_tile(
                out, total, peak, query, row, key_ptr + head_offset, value_ptr + head_offset,
                table_ptr + table_row * table_stride, block_stride, first, visible_from, end, score_scale, cap, window,
                HEAD_DIM, BLOCK_SIZE, TILE_KEYS, True, False, HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
        seq_head = seq * tl.num_programs(0) + head
        if num_shares <= 1:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head * GROUP + row, mask=row < GROUP, other=0.0)
                out, total, peak = add_sink(out, total, peak, sink)
            out = out / tl.maximum(total, 1e-30)[:, None]
            out_offsets = (seq_head * GROUP + row)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            # total > 0: a share has at least one visible key
            part = (seq_head * GROUP + row) * num_splits + split
            tl.store(part_lse_ptr + part, peak + tl.log2(total), mask=row < GROUP)
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], out / total[:, None], mask=mask)


@triton.jit
def _num_shares(context, window, num_splits, min_share, TILE_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key to read, and the number of tiles in a share and of shares."""
    base = 0
    if HAS_WINDOW:
        base = tl.maximum(context - window, 0) // TILE_KEYS * TILE_KEYS
    num_tiles = tl.cdiv(context - base, TILE_KEYS)
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), min_share)
    return base, share, tl.cdiv(num_tiles, share)


@triton.jit(do_not_specialize=["window", "num_splits", "min_share"])
def _merge_shares_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    context_ptr,
    sink_ptr,
    window,
    num_splits,
    min_share,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A program ends one query head of one sequence."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    _, _, num_shares = _num_shares(tl.load(context_ptr + seq), window, num_splits, min_share, TILE_KEYS, HAS_WINDOW)
    if num_shares > 1:
        place = seq * tl.num_programs(1) + head
        part = place * num_splits + split
        mask = (split < num_shares)[:, None] & (dim < HEAD_DIM)[None, :]
        lse = tl.load(part_lse_ptr + part, mask=split < num_shares, other=NOTHING)
        parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        peak = tl.max(lse, 0)
        if HAS_SINKS:
            sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
            peak = tl.maximum(peak, sink)
        weights = tl.exp2(lse - peak)
        total = tl.sum(weights, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - peak)
        out = tl.sum(parts * weights[:, None], 0) / total
        tl.store(out_ptr + place * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How decode attention is laid out on the GPU. `min_share`: in tiles."""

    num_splits: int
    min_share: int
    tile_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's layout and scratch, for all layers of one shape.

    parts: fp32, [num_decodes, num_heads, num_splits, head_dim]; lse: the same without the last dimension, base 2.
    """

    tuning: Tuning
    parts: Tensor
    lse: Tensor


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attend the batch's first `num_decodes` tokens. See `paged_attention`; `out`: like query, contiguous."""
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_heads = query.shape[1]
    group = num_heads // num_kv_heads
    plan = _plan(batch, key_cache, num_heads)
    tuning = plan.tuning
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    score_scale, cap = score_constants(scale, softcap)
    sinks_or_any = query if sinks is None else sinks
    window = sliding_window or 0
    has_window = sliding_window is not None
    _decode_kernel[(num_kv_heads, batch.num_decodes, tuning.num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        plan.parts,
        plan.lse,
        batch.block_tables,
        batch.rows,
        batch.context_lens,
        sinks_or_any,
        score_scale,
        cap,
        window,
        tuning.num_splits,
        tuning.min_share,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        batch.block_tables.stride(0),
        group,
        head_dim,
        block_size,
        max(16, triton.next_power_of_2(group)),
        tuning.tile_keys,
        dim_padded,
        has_window,
        softcap is not None,
        sinks is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if tuning.num_splits > 1:
        _merge_shares_kernel[(batch.num_decodes, num_heads)](
            plan.parts,
            plan.lse,
            out,
            batch.context_lens,
            sinks_or_any,
            window,
            tuning.num_splits,
            tuning.min_share,
            head_dim,
            tuning.tile_keys,
            dim_padded,
            triton.next_power_of_2(tuning.num_splits),
            has_window,
            sinks is not None,
            num_warps=4,
        )


def _plan(batch: PagedBatch, key_cache: Tensor, num_heads: int) -> Plan:
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    # A CUDA graph's scratch is its own: what was made before its capture may be gone when it is replayed.
    capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("decode", num_kv_heads, num_heads, head_dim, capturing)
    if key not in batch.plans:
        tuning = tune(batch.num_decodes, num_kv_heads, head_dim, key_cache.dtype, num_sms(key_cache.device))
        shape = (batch.num_decodes, num_heads, tuning.num_splits) if tuning.num_splits > 1 else (0, 0, 0)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=key_cache.device)
        batch.plans[key] = Plan(tuning, parts, torch.empty(shape, dtype=torch.float32, device=key_cache.device))
    plan: Plan = batch.plans[key]
    return plan


def tune(num_decodes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, sms: int) -> Tuning:
    """The layout for a batch; it must not depend on the contexts, which change under a CUDA graph."""
    programs = num_decodes * num_kv_heads
    num_splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, 4 * sms // programs)))
    if dtype == torch.float32 or head_dim > 128:
        return Tuning(num_splits, 1, tile_keys=32, num_warps=4, num_stages=2)
    return Tuning(num_splits, 1, tile_keys=64, num_warps=2, num_stages=3)
