"""Decode attention: one new token per sequence, its context split over programs (flash-decoding, Dao et al. 2023).

A program has one KV head of one sequence and a share of its keys; the query heads of that KV head are the rows of its
tile. How many shares a sequence has is computed on the device from its length, so that a CUDA graph serves any. The
last program of a sequence and KV head to finish merges the shares: at batch 1 a second kernel would cost a third more.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.tile import NOTHING, add_sink, attend_tile, num_sms, score_constants

MAX_SPLITS = 64


@triton.jit(do_not_specialize=["num_splits", "window", "table_stride"])
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    arrived_ptr,
    table_ptr,
    row_ptr,
    context_ptr,
    sink_ptr,
    score_scale,
    cap,
    window,
    num_splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
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
    base = visible_from // TILE_KEYS * TILE_KEYS
    num_tiles = tl.cdiv(context - base, TILE_KEYS)
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    num_shares = tl.cdiv(num_tiles, share)
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
            part = (seq_head * num_splits + split) * GROUP + row
            tl.store(part_lse_ptr + part, peak + tl.log2(total), mask=row < GROUP)
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], out / total[:, None], mask=mask)
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            if tl.atomic_add(arrived_ptr + seq_head, 1, sem="acq_rel", scope="gpu") == num_shares - 1:
                tl.store(arrived_ptr + seq_head, 0)  # as the next layer expects it
                _merge_shares(
                    part_ptr, part_lse_ptr, out_ptr, sink_ptr, seq_head, head, num_splits, num_shares,
                    GROUP, GROUP_PADDED, HEAD_DIM, HEAD_DIM_PADDED, TILE_SPLITS, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def _merge_shares(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    sink_ptr,
    seq_head,
    head,
    num_splits,
    num_shares,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    out = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    peak = tl.full([GROUP_PADDED], NOTHING, tl.float32)
    for first in range(0, num_shares, TILE_SPLITS):
        split = first + tl.arange(0, TILE_SPLITS)
        part = (seq_head * num_splits + split)[:, None] * GROUP + row[None, :]
        mask = (split < num_shares)[:, None] & (row < GROUP)[None, :]
        lse = tl.load(part_lse_ptr + part, mask=mask, other=NOTHING, cache_modifier=".cg")
        value = tl.load(
            part_ptr + part[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=mask[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        out = out * decay[:, None] + tl.sum(weights[:, :, None] * value, 0)
        peak = new_peak
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head * GROUP + row, mask=row < GROUP, other=0.0)
        out, total, peak = add_sink(out, total, peak, sink)
    out = out / total[:, None]
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = (seq_head * GROUP + row)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How decode attention is laid out on the GPU."""

    num_splits: int
    tile_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's layout and scratch, for all layers of one shape.

    parts: fp32, [num_decodes, num_kv_heads, num_splits, group, head_dim]; lse without the last dimension.
    arrived: [num_decodes * num_kv_heads], int32: how many shares are done; each launch leaves zeros behind.
    """

    tuning: Tuning
    parts: Tensor
    lse: Tensor
    arrived: Tensor


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
    group = query.shape[1] // num_kv_heads
    plan = _plan(batch, key_cache, group)
    tuning = plan.tuning
    group_padded, dim_padded = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    score_scale, cap = score_constants(scale, softcap)
    _decode_kernel[(num_kv_heads, batch.num_decodes, tuning.num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        plan.parts,
        plan.lse,
        plan.arrived,
        batch.block_tables,
        batch.rows,
        batch.context_lens,
        query if sinks is None else sinks,
        score_scale,
        cap,
        sliding_window or 0,
        tuning.num_splits,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        batch.block_tables.stride(0),
        group,
        group_padded,
        head_dim,
        block_size,
        max(16, group_padded),
        tuning.tile_keys,
        max(1, min(16, 8192 // (group_padded * dim_padded))),
        dim_padded,
        sliding_window is not None,
        softcap is not None,
        sinks is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _plan(batch: PagedBatch, key_cache: Tensor, group: int) -> Plan:
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    # What was made before a CUDA graph's capture may be gone when it is replayed.
    capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("decode", num_kv_heads, group, head_dim, capturing)
    if key not in batch.plans:
        tuning = tune(batch.num_decodes, num_kv_heads, head_dim, key_cache.dtype, num_sms(key_cache.device))
        shape = (batch.num_decodes, num_kv_heads, tuning.num_splits, group)
        device = key_cache.device
        batch.plans[key] = Plan(
            tuning,
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.zeros(batch.num_decodes * num_kv_heads, dtype=torch.int32, device=device),
        )
    plan: Plan = batch.plans[key]
    return plan


def tune(num_decodes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, sms: int) -> Tuning:
    """The layout for a batch; it must not depend on the contexts, which change under a CUDA graph."""
    programs = num_decodes * num_kv_heads
    num_splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, 4 * sms // programs)))
    if dtype == torch.float32 or head_dim > 128:
        return Tuning(num_splits, tile_keys=32, num_warps=4, num_stages=2)
    return Tuning(num_splits, tile_keys=64, num_warps=4, num_stages=3)
