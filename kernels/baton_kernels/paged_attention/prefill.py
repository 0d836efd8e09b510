"""Prefill attention: chunks of any lengths over their cached context, all in one launch.

A program handles one KV head and a run of rows. A row is one query head of one token; the heads that share the KV head
are adjacent, so that a short chunk still fills its tile and keys are read once for the whole group. A sequence's first
programs take its last rows, which see the most keys. When there are few rows, the keys are split over programs as well,
and `merge_splits_kernel` merges the parts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.device import num_sms
from baton_kernels.fp8_kv.kernel import head_stride
from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.merge import merge_splits_kernel
from baton_kernels.paged_attention.tile import NOTHING, Scoring, add_sink, attend_tile

MAX_SPLITS = 32
KEYS_PER_SPLIT = 512  # at least
MERGED_ROWS = 16
"""Rows that a program of the merge takes."""


@triton.jit(do_not_specialize=["window", "first_seq", "num_splits", "table_stride"])
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    row_ptr,
    query_start_ptr,
    context_ptr,
    sink_ptr,
    score_scale,
    cap,
    window,
    first_seq,
    num_splits,
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
    SPLIT: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    seq = first_seq + tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    first_token = tl.load(query_start_ptr + seq)
    length = tl.load(query_start_ptr + seq + 1) - first_token
    tile = tl.cdiv(length * GROUP, TILE_ROWS) - 1 - tl.program_id(1)
    if tile >= 0:
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        dim = tl.arange(0, HEAD_DIM_PADDED)
        mask = (row < length * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        token = (first_token + row // GROUP).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        query_offsets = (token * query_token_stride + query_head * query_head_stride)[:, None] + dim[None, :]
        query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)

        before = tl.load(context_ptr + seq) - length
        positions = before + row // GROUP
        lowest = before + tile * TILE_ROWS // GROUP
        end = before + tl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP + 1, length)
        visible_from = 0
        seen_by_all = (lowest + 1) // TILE_KEYS * TILE_KEYS  # keys before this need no mask
        if HAS_WINDOW:
            visible_from = tl.maximum(lowest - window + 1, 0)
            seen_by_all = 0
        start = visible_from // TILE_KEYS * TILE_KEYS
        if SPLIT:
            share = tl.maximum(tl.cdiv(tl.cdiv(end - start, TILE_KEYS), num_splits), MIN_SHARE) * TILE_KEYS
            start += split * share
            end = tl.minimum(end, start + share)
        middle = tl.minimum(tl.maximum(seen_by_all, start), tl.maximum(end, start))

        out = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], NOTHING, tl.float32)
        table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
        key_head = key_ptr + head * head_stride(key_ptr, BLOCK_SIZE, HEAD_DIM)
        value_head = value_ptr + head * head_stride(key_ptr, BLOCK_SIZE, HEAD_DIM)
        for first in range(start, middle, TILE_KEYS):
            out, total, peak = attend_tile(
                out, total, peak, query, positions, key_head, value_head, table, block_stride, first, visible_from, end,
                score_scale, cap, window,
                HEAD_DIM, BLOCK_SIZE, TILE_KEYS, False, True, HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
        for first in range(middle, end, TILE_KEYS):
            out, total, peak = attend_tile(
                out, total, peak, query, positions, key_head, value_head, table, block_stride, first, visible_from, end,
                score_scale, cap, window,
                HEAD_DIM, BLOCK_SIZE, TILE_KEYS, True, True, HAS_WINDOW, HAS_CAP,
            )  # fmt: skip

        if SPLIT:
            lse = tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), NOTHING)
            out = out / tl.maximum(total, 1e-30)[:, None]
            program = (tl.program_id(2) * tl.num_programs(1) + tile) * tl.num_programs(0) + head
            part = program * TILE_ROWS + tl.arange(0, TILE_ROWS)
            tl.store(part_lse_ptr + part, lse)
            part_mask = (dim < HEAD_DIM)[None, :] & (start < end)
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], out, mask=part_mask)
        else:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + query_head)
                out, total, peak = add_sink(out, total, peak, sink)
            out = out / tl.maximum(total, 1e-30)[:, None]
            out_offsets = (token * num_heads + query_head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How prefill attention is laid out on the GPU."""

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's layout, for all layers of one shape. max_tiles: of the longest chunk. dim_padded: head_dim rounded up to
    a power of 2, at least 16."""

    tuning: Tuning
    max_tiles: int
    num_splits: int
    dim_padded: int


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    seqs: range,
    out: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> None:
    """Attend the new tokens of the sequences `seqs`. See `paged_attention`; `out`: like query, contiguous.

    A sequence may have fewer new tokens on the device than `batch.query_lens` says, but not more: in a CUDA graph those
    are upper bounds.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    plan = _plan(batch, query, key_cache, seqs, scoring.window)
    tuning, num_splits, dim_padded = plan.tuning, plan.num_splits, plan.dim_padded
    grid = (num_kv_heads, plan.max_tiles, len(seqs) * num_splits)
    parts = lse = out
    if num_splits > 1:
        num_parts = grid[0] * grid[1] * grid[2] * tuning.tile_rows
        parts = query.new_empty((num_parts, head_dim), dtype=torch.float32)
        lse = query.new_empty(num_parts, dtype=torch.float32)
    sinks_or_any = query if sinks is None else sinks
    _prefill_kernel[grid](
        query, key_cache, value_cache, out, parts, lse,
        batch.block_tables, batch.rows, batch.query_starts, batch.context_lens, sinks_or_any,
        scoring.score_scale, scoring.cap, scoring.window or 0, seqs.start, num_splits,
        query.stride(0), query.stride(1), key_cache.stride(0), batch.block_tables.stride(0),
        group, head_dim, block_size, tuning.tile_rows, tuning.tile_keys, dim_padded,
        num_splits > 1, max(1, KEYS_PER_SPLIT // tuning.tile_keys),
        scoring.window is not None, scoring.has_cap, sinks is not None,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merged_rows = min(MERGED_ROWS, tuning.tile_rows)
        merge_splits_kernel[(tuning.tile_rows // merged_rows, num_kv_heads * plan.max_tiles, len(seqs))](
            parts, lse, sinks_or_any, out, batch.query_starts, seqs.start, num_splits,
            num_kv_heads, group, head_dim, tuning.tile_rows, dim_padded, triton.next_power_of_2(num_splits),
            merged_rows, sinks is not None,
        )  # fmt: skip


def _plan(batch: PagedBatch, query: Tensor, key_cache: Tensor, seqs: range, sliding_window: int | None) -> Plan:
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    key = ("prefill", num_kv_heads, group, head_dim, sliding_window, seqs)
    if key not in batch.plans:
        sms = num_sms(key_cache.device)
        lengths = batch.query_lens[seqs.start : seqs.stop]
        num_rows = min(sum(lengths), batch.num_tokens - batch.num_decodes) * group  # a graph's are upper bounds
        tuning = tune(max(lengths) * group, num_rows * num_kv_heads, head_dim, query.dtype, sms)
        max_tiles = triton.cdiv(max(lengths) * group, tuning.tile_rows)
        num_splits = min(MAX_SPLITS, 2 * sms // (triton.cdiv(num_rows, tuning.tile_rows) * num_kv_heads))
        if batch.host_context_lens:
            most_keys = max(batch.host_context_lens[seqs.start : seqs.stop])
            if sliding_window is not None:
                most_keys = min(most_keys, sliding_window + max(lengths))
            num_splits = min(num_splits, most_keys // KEYS_PER_SPLIT)
        dim_padded = max(16, triton.next_power_of_2(head_dim))
        batch.plans[key] = Plan(tuning, max_tiles, max(1, num_splits), dim_padded)
    plan: Plan = batch.plans[key]
    return plan


def tune(chunk_rows: int, all_rows: int, head_dim: int, dtype: torch.dtype, sms: int) -> Tuning:
    """`chunk_rows`: the longest chunk's tokens times the heads of a group; `all_rows`: all tokens times all heads."""
    if dtype == torch.float32:
        return Tuning(tile_rows=32, tile_keys=32, num_warps=4, num_stages=2)
    if head_dim > 256:  # shared memory holds no more
        return Tuning(min(32, max(16, triton.next_power_of_2(chunk_rows))), tile_keys=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tuning(min(64, max(16, triton.next_power_of_2(chunk_rows))), tile_keys=64, num_warps=4, num_stages=2)
    if chunk_rows <= 32:
        return Tuning(max(16, triton.next_power_of_2(chunk_rows)), tile_keys=64, num_warps=4, num_stages=3)
    # us on an H200 for prompts of 512, 1024, 2048, 8192 and for 1024 after 7168: 28.7, 67, 103, 1381, 357 with 256
    # rows; 19.7, 39.9, 118, 1505, 370 with 128; 17.5, 37.3, 120, 1670, 414 with 64.
    if all_rows >= 256 * 1.5 * sms:
        return Tuning(tile_rows=256, tile_keys=64, num_warps=8, num_stages=3)
    if all_rows >= 128 * sms:
        return Tuning(tile_rows=128, tile_keys=128, num_warps=8, num_stages=3)
    return Tuning(tile_rows=64, tile_keys=64, num_warps=4, num_stages=3)
