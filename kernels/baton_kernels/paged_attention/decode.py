"""Decode attention: one new token per sequence, its context split over programs (flash-decoding, Dao et al. 2023).

A program has one KV head of one sequence and a share of its keys; the query heads of that KV head are the rows of its
tile. A second kernel merges the shares. What a share is, each program computes from all sequences' lengths: as many
keys as give every processor a few programs. So a CUDA graph serves any lengths, and one long sequence among short
ones is spread over the GPU (63 of 512 and one of 32768: 103 us a layer, and 1064 without).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.tile import NOTHING, add_sink, attend_tile, num_sms, score_constants
from baton_kernels.pdl import launch_options

MAX_SPLITS = 64
MAX_SHARES = 4096  # of all sequences together: 68 MB of parts for 32 heads of 128
PROGRAMS_PER_SM = 3.2


@triton.jit(do_not_specialize=["window", "num_splits", "num_programs", "table_stride"])
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
    num_programs,
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
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + seq)
    table_row = tl.load(row_ptr + seq).to(tl.int64)
    visible_from = 0
    if HAS_WINDOW:
        visible_from = tl.maximum(context - window, 0)
    base, share, num_shares = _share_out(
        context_ptr, context, window, tl.num_programs(1), tl.num_programs(0), num_splits, num_programs,
        TILE_KEYS, HAS_WINDOW,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
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
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
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
def _share_out(
    context_ptr,
    context,
    window,
    num_seqs,
    num_kv_heads,
    num_splits,
    num_programs,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Of a sequence with `context` tokens: the first key to read, the tiles of a share, and the number of shares."""
    all_tiles = 0
    for first in range(0, num_seqs, 128):
        seq = first + tl.arange(0, 128)
        contexts = tl.load(context_ptr + seq, mask=seq < num_seqs, other=0)
        if HAS_WINDOW:
            contexts = tl.minimum(contexts, window)
        all_tiles += tl.sum(tl.cdiv(contexts, TILE_KEYS), 0)
    base = 0
    if HAS_WINDOW:
        base = tl.maximum(context - window, 0) // TILE_KEYS * TILE_KEYS
    num_tiles = tl.cdiv(context - base, TILE_KEYS)
    share = tl.maximum(tl.cdiv(all_tiles * num_kv_heads, num_programs), tl.cdiv(num_tiles, num_splits))
    num_shares = tl.cdiv(num_tiles, tl.maximum(share, 1))
    return base, tl.cdiv(num_tiles, tl.maximum(num_shares, 1)), num_shares


@triton.jit(do_not_specialize=["window", "num_kv_heads", "num_splits", "num_programs"])
def _merge_shares_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    context_ptr,
    sink_ptr,
    window,
    num_kv_heads,
    num_splits,
    num_programs,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program ends some query heads of one sequence, one after the other."""
    seq = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    context = tl.load(context_ptr + seq)
    _, _, num_shares = _share_out(
        context_ptr, context, window, tl.num_programs(0), num_kv_heads, num_splits, num_programs, TILE_KEYS, HAS_WINDOW
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_shares > 1:
        for head in range(tl.program_id(1), NUM_HEADS, tl.num_programs(1)):
            place = seq * NUM_HEADS + head
            out = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            total = 0.0
            peak = NOTHING
            if HAS_SINKS:
                peak = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
                total = 1.0
            for first in range(0, num_shares, TILE_SPLITS):
                split = first + tl.arange(0, TILE_SPLITS)
                part = place * num_splits + split
                mask = (split < num_shares)[:, None] & (dim < HEAD_DIM)[None, :]
                lse = tl.load(part_lse_ptr + part, mask=split < num_shares, other=NOTHING)
                parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                weights = tl.exp2(lse - new_peak)
                decay = tl.exp2(peak - new_peak)
                total = total * decay + tl.sum(weights, 0)
                out = out * decay + tl.sum(parts * weights[:, None], 0)
                peak = new_peak
            tl.store(out_ptr + place * HEAD_DIM + dim, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


class Tuning(NamedTuple):
    """How decode attention is laid out on the GPU. `num_splits` bounds the shares of a sequence, and contexts are
    shared out to about `num_programs` programs in all."""

    num_splits: int
    num_programs: int
    tile_keys: int
    num_warps: int
    num_stages: int


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
    tuning, parts, lse = _plan(batch, key_cache, num_heads)
    tile_rows = max(16, triton.next_power_of_2(group))
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    score_scale, cap = score_constants(scale, softcap)
    sinks_or_any = query if sinks is None else sinks
    window = sliding_window or 0
    has_window = sliding_window is not None
    pdl = launch_options(query.device)
    _decode_kernel[(num_kv_heads, batch.num_decodes, tuning.num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        parts,
        lse,
        batch.block_tables,
        batch.rows,
        batch.context_lens,
        sinks_or_any,
        score_scale,
        cap,
        window,
        tuning.num_splits,
        tuning.num_programs,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        batch.block_tables.stride(0),
        group,
        head_dim,
        block_size,
        tile_rows,
        tuning.tile_keys,
        dim_padded,
        has_window,
        softcap is not None,
        sinks is not None,
        # Not started early: programs that are put where the kernel before leaves room are spread unevenly, and stay.
        # 32 sequences of 1024 then take 48 us for 39, of 8192 296 for 248.
        PDL=pdl["PDL"],
        num_warps=tuning.num_warps * tile_rows // 16,
        num_stages=tuning.num_stages,
    )
    if tuning.num_splits == 1:
        return
    # Where most sequences have one share, many small programs would take longer to start than to find that out.
    heads_at_once = num_heads if batch.num_decodes <= 16 else num_kv_heads
    _merge_shares_kernel[(batch.num_decodes, heads_at_once)](
        parts,
        lse,
        out,
        batch.context_lens,
        sinks_or_any,
        window,
        num_kv_heads,
        tuning.num_splits,
        tuning.num_programs,
        num_heads,
        head_dim,
        tuning.tile_keys,
        dim_padded,
        max(1, 4096 // dim_padded),
        has_window,
        sinks is not None,
        num_warps=4,
        **pdl,
    )


def _plan(batch: PagedBatch, key_cache: Tensor, num_heads: int) -> tuple[Tuning, Tensor, Tensor]:
    """The layout for all layers of this shape, and scratch for it: parts, fp32, [num_decodes, num_heads, num_splits,
    head_dim], and their log-sum-exp in base 2."""
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    # A CUDA graph's scratch is its own: what was made before its capture may be gone when it is replayed.
    capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("decode", num_kv_heads, num_heads, head_dim, capturing)
    if key not in batch.plans:
        tuning = tune(batch.num_decodes, num_kv_heads, head_dim, key_cache.dtype, num_sms(key_cache.device))
        shape = (batch.num_decodes, num_heads, tuning.num_splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=key_cache.device)
        batch.plans[key] = (tuning, parts, torch.empty(shape, dtype=torch.float32, device=key_cache.device))
    plan: tuple[Tuning, Tensor, Tensor] = batch.plans[key]
    return plan


def tune(num_decodes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, sms: int) -> Tuning:
    """The layout for a batch; it must not depend on the contexts, which change under a CUDA graph."""
    num_programs = int(PROGRAMS_PER_SM * sms)
    room = min(MAX_SPLITS, max(1, MAX_SHARES // num_decodes))
    of_use = triton.next_power_of_2(triton.cdiv(num_programs, num_kv_heads))  # one sequence alone has so many shares
    num_splits = min(triton.next_power_of_2(room + 1) // 2, of_use)
    if dtype == torch.float32:
        return Tuning(num_splits, num_programs, tile_keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tuning(num_splits, num_programs, tile_keys=16, num_warps=2, num_stages=4)
    # us on an H200 for contexts of 1024 at batch 1, 8, 32, 64, 128, 256 (floor 1, 8, 31, 63, 125, 251), without the
    # merge where a sequence has one share: tiles of 16 keys 6.6, 14.8, 38.8, 66.0, 125.6, 260; of 32 keys at the last
    # four 42.7, 75.9, 126.9, 248. One processor has room for 10 programs of the former.
    if num_decodes * num_kv_heads > 10 * sms:
        return Tuning(num_splits, num_programs, tile_keys=32, num_warps=1, num_stages=4)
    return Tuning(num_splits, num_programs, tile_keys=16, num_warps=1, num_stages=5)
