"""Decode attention: one new token per sequence, its context split over programs (flash-decoding, Dao et al. 2023).

A program has one KV head and a share of one sequence's keys; the query heads of that KV head are the rows of its tile.
How long a share is, each program computes from all sequences' lengths: as many keys as give every processor a few
programs. Shares of all sequences stand in one row, and a program finds its own by its place there. So a CUDA graph
serves any lengths without programs that have nothing to do, and one long sequence among short ones is spread over the
GPU. A second kernel merges the shares of sequences that have several.
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

PROGRAMS_PER_SM = 3.2


@triton.jit(do_not_specialize=["window", "num_seqs", "num_programs", "table_stride"])
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
    num_seqs,
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
    num_kv_heads = tl.num_programs(0)
    place = tl.program_id(1)
    seq, first_place, num_shares = _find(
        context_ptr, place, window, num_seqs, num_kv_heads, num_programs, TILE_KEYS, HAS_WINDOW, False
    )
    # What is read above is older than the kernel just before this one; that has written a key, a value and the query.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_shares > 0:
        context = tl.load(context_ptr + seq)
        table_row = tl.load(row_ptr + seq).to(tl.int64)
        visible_from, base, num_tiles = _extent(context, window, TILE_KEYS, HAS_WINDOW)
        share = tl.cdiv(num_tiles, num_shares) * TILE_KEYS  # no tiles: a padding entry, for which zeros are written
        start = base + (place - first_place) * share
        end = tl.minimum(context, start + share)
        row = tl.arange(0, TILE_ROWS)
        dim = tl.arange(0, HEAD_DIM_PADDED)
        mask = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
        query_offsets = (head * GROUP + row)[:, None] * query_head_stride + dim[None, :]
        query = tl.load(query_ptr + seq.to(tl.int64) * query_token_stride + query_offsets, mask=mask, other=0.0)
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
        if num_shares == 1:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head * GROUP + row, mask=row < GROUP, other=0.0)
                out, total, peak = add_sink(out, total, peak, sink)
            out = out / tl.maximum(total, 1e-30)[:, None]
            out_rows = (seq.to(tl.int64) * num_kv_heads + head) * GROUP + row
            tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            # A share may be empty, the last ones of a sequence, when the others are rounded up to whole tiles.
            part = (place * num_kv_heads + head) * GROUP + row
            lse = tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), NOTHING)
            tl.store(part_lse_ptr + part, lse, mask=row < GROUP)
            out = out / tl.maximum(total, 1e-30)[:, None]
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], out, mask=mask)


@triton.jit
def _extent(context, window, TILE_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first visible key, the first key of its tile, and the number of tiles."""
    visible_from = context * 0
    if HAS_WINDOW:
        visible_from = tl.maximum(context - window, 0)
    base = visible_from // TILE_KEYS * TILE_KEYS
    return visible_from, base, tl.cdiv(context - base, TILE_KEYS)


@triton.jit
def _find(
    context_ptr,
    wanted,
    window,
    num_seqs,
    num_kv_heads,
    num_programs,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The sequence whose shares place `wanted` is among or, to MERGE, the `wanted`th sequence with several shares;
    the place of its first share, and the number of them, 0 when there is no such sequence."""
    all_tiles = 0
    for first in range(0, num_seqs, 128):
        seq = first + tl.arange(0, 128)
        _, _, tiles = _extent(tl.load(context_ptr + seq, mask=seq < num_seqs, other=0), window, TILE_KEYS, HAS_WINDOW)
        all_tiles += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(all_tiles * num_kv_heads, num_programs), 1)
    found = 0
    found_place = 0
    found_shares = 0
    place = 0
    rank = 0
    for first in range(0, num_seqs, 128):
        seq = first + tl.arange(0, 128)
        _, _, tiles = _extent(tl.load(context_ptr + seq, mask=seq < num_seqs, other=0), window, TILE_KEYS, HAS_WINDOW)
        shares = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(tiles, share), 1), 0)
        starts = place + tl.cumsum(shares, 0) - shares
        if MERGE:
            several = (shares > 1).to(tl.int32)
            here = (several > 0) & (rank + tl.cumsum(several, 0) - 1 == wanted)
            rank += tl.sum(several, 0)
        else:
            here = (starts <= wanted) & (wanted < starts + shares)
        found += tl.sum(tl.where(here, seq, 0), 0)
        found_place += tl.sum(tl.where(here, starts, 0), 0)
        found_shares += tl.sum(tl.where(here, shares, 0), 0)
        place += tl.sum(shares, 0)
    return found, found_place, found_shares


@triton.jit(do_not_specialize=["window", "num_seqs", "num_kv_heads", "num_programs"])
def _merge_shares_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    context_ptr,
    sink_ptr,
    window,
    num_seqs,
    num_kv_heads,
    num_programs,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_SHARES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program ends some query heads of one sequence, one after the other."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    seq, first_place, num_shares = _find(
        context_ptr, tl.program_id(0), window, num_seqs, num_kv_heads, num_programs, TILE_KEYS, HAS_WINDOW, True
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_shares > 1:
        for head in range(tl.program_id(1), NUM_HEADS, tl.num_programs(1)):
            out = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            total = 0.0
            peak = NOTHING
            if HAS_SINKS:
                peak = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
                total = 1.0
            for first in range(0, num_shares, TILE_SHARES):
                share = first + tl.arange(0, TILE_SHARES)
                part = (first_place + share) * NUM_HEADS + head
                mask = (share < num_shares)[:, None] & (dim < HEAD_DIM)[None, :]
                lse = tl.load(part_lse_ptr + part, mask=share < num_shares, other=NOTHING)
                parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                weights = tl.exp2(lse - new_peak)
                decay = tl.exp2(peak - new_peak)
                total = total * decay + tl.sum(weights, 0)
                out = out * decay + tl.sum(parts * weights[:, None], 0)
                peak = new_peak
            offsets = (seq.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim
            tl.store(out_ptr + offsets, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


class Tuning(NamedTuple):
    """How decode attention is laid out on the GPU. Contexts are shared out to about `num_programs` programs in all."""

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
    num_heads, num_seqs = query.shape[1], batch.num_decodes
    group = num_heads // num_kv_heads
    tuning, parts, lse = _plan(batch, key_cache, num_heads)
    tile_rows = max(16, triton.next_power_of_2(group))
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    score_scale, cap = score_constants(scale, softcap)
    sinks_or_any = query if sinks is None else sinks
    window = sliding_window or 0
    has_window = sliding_window is not None
    pdl = launch_options(query.device)
    # Every sequence has a share, and those that have more have at most so many more together.
    num_more = triton.cdiv(tuning.num_programs, num_kv_heads)
    _decode_kernel[(num_kv_heads, num_seqs + num_more)](
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
        num_seqs,
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
    # Where most sequences have one share, many small programs would take longer to start than to find that out.
    heads_at_once = num_heads if num_seqs <= 16 else num_kv_heads
    _merge_shares_kernel[(min(num_seqs, num_more), heads_at_once)](
        parts,
        lse,
        out,
        batch.context_lens,
        sinks_or_any,
        window,
        num_seqs,
        num_kv_heads,
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
    """The layout for all layers of this shape, and scratch for it: parts, fp32, [num_places, num_heads, head_dim], and
    their log-sum-exp in base 2."""
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    # A CUDA graph's scratch is its own: what was made before its capture may be gone when it is replayed.
    capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("decode", num_kv_heads, num_heads, head_dim, capturing)
    if key not in batch.plans:
        tuning = tune(batch.num_decodes, num_kv_heads, head_dim, key_cache.dtype, num_sms(key_cache.device))
        shape = (batch.num_decodes + triton.cdiv(tuning.num_programs, num_kv_heads), num_heads)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=key_cache.device)
        batch.plans[key] = (tuning, parts, torch.empty(shape, dtype=torch.float32, device=key_cache.device))
    plan: tuple[Tuning, Tensor, Tensor] = batch.plans[key]
    return plan


def tune(num_decodes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, sms: int) -> Tuning:
    """The layout for a batch; it must not depend on the contexts, which change under a CUDA graph."""
    num_programs = int(PROGRAMS_PER_SM * sms)
    if dtype == torch.float32:
        return Tuning(num_programs, tile_keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tuning(num_programs, tile_keys=16, num_warps=2, num_stages=4)
    # One processor has room for 5 programs with tiles of 16 keys. At 8 KV heads, a step of an 8B model on an H200 took
    # with tiles of 16 and of 32 keys 17.1 and 16.5 ms at batch 256, 9.8 and 9.7 at 128, 6.9 and 7.2 at 64.
    if num_decodes * num_kv_heads > 6 * sms:
        return Tuning(num_programs, tile_keys=32, num_warps=1, num_stages=4)
    return Tuning(num_programs, tile_keys=16, num_warps=1, num_stages=5)
