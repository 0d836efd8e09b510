"""Decode attention: one new token per sequence, its context split over programs (flash-decoding, Dao et al. 2023).

A program handles one KV head and a share of one sequence's keys; the query heads of that KV head are the rows of its
tile. Once per step, a small kernel sets the length of the shares from all sequences' lengths, so that one program per
share fills the GPU. It writes the shares of all sequences into one list, so a CUDA graph serves any lengths with few
idle programs, and one long sequence among short ones is spread over the GPU. A third kernel merges the shares of
sequences that have several.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.device import num_sms
from baton_kernels.fp8_kv import is_quantized
from baton_kernels.fp8_kv.kernel import head_stride
from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.tile import NOTHING, Scoring, add_sink, attend_tile
from baton_kernels.pdl import launch_options


@triton.jit(do_not_specialize=["window", "num_seqs", "num_shares", "num_merges"])
def _share_out_kernel(
    context_ptr,
    shares_ptr,
    merges_ptr,
    window,
    num_seqs,
    num_shares,
    num_merges,
    wanted_shares,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SEQS_PADDED: tl.constexpr,
):
    """Runs as one program. The length of a share is the smallest for which all sequences together have at most
    `wanted_shares`; with that many sequences or more, it is the total length divided by `wanted_shares`. Padding
    entries have a share each, which does not count where there is room for them."""
    seq = tl.arange(0, SEQS_PADDED)
    there = seq < num_seqs
    context = tl.load(context_ptr + seq, mask=there, other=0)
    base = context * 0
    if HAS_WINDOW:
        base = tl.maximum(context - window, 0) // TILE_KEYS * TILE_KEYS
    tiles = tl.cdiv(context - base, TILE_KEYS)  # 0 for a padding entry, whose one share writes zeros
    low = tl.maximum(tl.cdiv(tl.sum(tiles, 0), wanted_shares), 1)
    num_padding = tl.sum((there & (tiles == 0)).to(tl.int32), 0)
    most = tl.minimum(wanted_shares + num_padding, num_shares)
    if num_seqs < most:
        high = tl.maximum(tl.max(tiles, 0), low)
        while low < high:
            middle = (low + high) // 2
            if tl.sum(tl.where(there, tl.maximum(tl.cdiv(tiles, middle), 1), 0), 0) <= most:
                high = middle
            else:
                low = middle + 1
    count = tl.where(there, tl.maximum(tl.cdiv(tiles, low), 1), 0)
    first = tl.cumsum(count, 0) - count
    for i in range(tl.max(count, 0)):
        here = i < count
        entry = shares_ptr + (first + i) * 4
        tl.store(entry, seq, mask=here)
        tl.store(entry + 1, base + tiles * i // tl.maximum(count, 1) * TILE_KEYS, mask=here)
        end = base + tiles * (i + 1) // tl.maximum(count, 1) * TILE_KEYS
        tl.store(entry + 2, tl.minimum(end, context), mask=here)
        tl.store(entry + 3, count, mask=here)
    for i in range(tl.sum(count, 0), num_shares, SEQS_PADDED):
        tl.store(shares_ptr + (i + seq) * 4, -1, mask=i + seq < num_shares)
    several = (count > 1).to(tl.int32)
    entry = merges_ptr + (tl.cumsum(several, 0) - 1) * 4
    tl.store(entry, seq, mask=several > 0)
    tl.store(entry + 1, first, mask=several > 0)
    tl.store(entry + 2, count, mask=several > 0)
    for i in range(tl.sum(several, 0), num_merges, SEQS_PADDED):
        tl.store(merges_ptr + (i + seq) * 4, -1, mask=i + seq < num_merges)


@triton.jit(do_not_specialize=["window", "table_stride"])
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
    shares_ptr,
    sink_ptr,
    score_scale,
    cap,
    window,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    seq = tl.load(shares_ptr + place * 4)
    if seq >= 0:
        start = tl.load(shares_ptr + place * 4 + 1)
        end = tl.load(shares_ptr + place * 4 + 2)
        num_shares = tl.load(shares_ptr + place * 4 + 3)
        table_row = tl.load(row_ptr + seq).to(tl.int64)
        visible_from = 0
        if HAS_WINDOW:
            visible_from = tl.maximum(tl.load(context_ptr + seq) - window, 0)
        row = tl.arange(0, TILE_ROWS)
        dim = tl.arange(0, HEAD_DIM_PADDED)
        mask = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
        query_offsets = (head * GROUP + row)[:, None] * query_head_stride + dim[None, :]
        query = tl.load(query_ptr + seq.to(tl.int64) * query_token_stride + query_offsets, mask=mask, other=0.0)
        out = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], NOTHING, tl.float32)
        head_offset = head * head_stride(key_ptr, BLOCK_SIZE, HEAD_DIM)
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
            part = (place * num_kv_heads + head) * GROUP + row
            lse = tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), NOTHING)
            tl.store(part_lse_ptr + part, lse, mask=row < GROUP)
            out = out / tl.maximum(total, 1e-30)[:, None]
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], out, mask=mask)


@triton.jit
def _merge_shares_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    merges_ptr,
    sink_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_SHARES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program merges the shares of some query heads of one sequence, one head after another."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    entry = merges_ptr + tl.program_id(0) * 4
    seq = tl.load(entry)
    first_share = tl.load(entry + 1)
    num_shares = tl.load(entry + 2)
    # The reads above need no wait: this kernel begins when all programs of the attention kernel have waited for
    # `merges`, which none of them does after it lets this one begin.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq >= 0:
        for head in range(tl.program_id(1), NUM_HEADS, tl.num_programs(1)):
            out = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            total = 0.0
            peak = NOTHING
            if HAS_SINKS:
                peak = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
                total = 1.0
            for first in range(0, num_shares, TILE_SHARES):
                share = first + tl.arange(0, TILE_SHARES)
                part = (first_share + share) * NUM_HEADS + head
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


DIRECT_PROGRAMS = 8
"""Programs of `decode_fp8` per SM."""
DIRECT_HEAD_DIMS = (64, 128)
EARLY_BELOW = 0.3
"""Sequences times KV heads per SM. With fewer, the kernel is launched early, which makes a layer 0.3 us shorter."""


MERGED = 16
"""For so many sequences, programs with nothing to merge do not matter."""


class Tuning(NamedTuple):
    """How decode attention is laid out on the GPU. All contexts are split over about `num_programs` programs."""

    num_programs: int
    tile_keys: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """A step's shares, for all layers with the same heads and window, and scratch memory. On the device, int32:

    shares: [num_shares, 4]: sequence, first key, end, and the sequence's number of shares; sequence -1 if unused.
    merges: [num_merges, 4], for each sequence with several shares: the sequence, its first share, their number; or -1.
    parts: [num_shares, num_heads, head_dim], fp32, and lse: [num_shares, num_heads], their log-sum-exp in base 2.
    tile_rows, dim_padded: the shape of a program's tile of query heads. direct: whether the kernel of `decode_fp8`
    serves these layers. early: whether it is launched before the previous kernel is over. merged_at_once: how many of
    a sequence's heads have a program of their own that merges their shares.
    """

    tuning: Tuning
    shares: Tensor
    merges: Tensor
    parts: Tensor
    lse: Tensor
    tile_rows: int
    dim_padded: int
    direct: bool
    early: bool
    merged_at_once: int


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> None:
    """Attend the batch's first `num_decodes` tokens. See `paged_attention`; `out`: like query, contiguous."""
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_heads = query.shape[1]
    plan = _plan(batch, query, key_cache, scoring.window)
    tuning, tile_rows, dim_padded = plan.tuning, plan.tile_rows, plan.dim_padded
    sinks_or_any = query if sinks is None else sinks
    pdl = launch_options(query.device)
    arguments = (
        query, key_cache, value_cache, out, plan.parts, plan.lse,
        batch.block_tables, batch.rows, batch.context_lens, plan.shares, sinks_or_any,
        scoring.score_scale, scoring.cap, scoring.window or 0,
        query.stride(0), query.stride(1), key_cache.stride(0), batch.block_tables.stride(0),
        num_heads // num_kv_heads, head_dim, block_size,
    )  # fmt: skip
    features = scoring.window is not None, scoring.has_cap, sinks is not None
    grid = num_kv_heads, plan.shares.shape[0]
    # Larger batches are not launched early: programs placed where the previous kernel leaves room are spread unevenly,
    # and stay there. 32 sequences of 1024 then take 48 us instead of 39, those of 8192 296 instead of 248.
    if plan.direct:
        from baton_kernels.paged_attention.decode_fp8 import decode_kernel

        decode_kernel[grid](*arguments, *features, PDL=pdl["PDL"], num_warps=1)
    else:
        _decode_kernel[grid](
            *arguments, tile_rows, tuning.tile_keys, dim_padded, *features,
            num_warps=tuning.num_warps * tile_rows // 16, num_stages=tuning.num_stages,
            **(pdl if plan.early else {"PDL": pdl["PDL"]}),
        )  # fmt: skip
    _merge_shares_kernel[(plan.merges.shape[0], plan.merged_at_once)](
        plan.parts, plan.lse, out, plan.merges, sinks_or_any,
        num_heads, head_dim, dim_padded, max(1, 4096 // dim_padded), sinks is not None,
        num_warps=4, **pdl,
    )  # fmt: skip


def _plan(batch: PagedBatch, query: Tensor, key_cache: Tensor, sliding_window: int | None) -> Plan:
    """The plan of the step, made by the first layer of a kind for all layers of that kind."""
    num_heads, num_kv_heads, head_dim = query.shape[1], key_cache.shape[1], key_cache.shape[3]
    device, num_seqs = key_cache.device, batch.num_decodes
    # A CUDA graph has its own plan: one made before its capture may be freed by the time it is replayed.
    capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("decode", num_kv_heads, num_heads, head_dim, sliding_window, capturing)
    if key not in batch.plans:
        # Beside prompts, a CUDA graph has places for more sequences than there usually are.
        is_bound = not batch.host_context_lens and batch.num_tokens > num_seqs
        direct = _is_direct(query, key_cache)
        if direct:
            tuning = Tuning(DIRECT_PROGRAMS * num_sms(device), tile_keys=32, num_warps=1, num_stages=1)
        else:
            tuning = tune(num_seqs, num_kv_heads, head_dim, query.dtype, num_sms(device), is_bound)
        wanted = max(1, tuning.num_programs // num_kv_heads)
        num_shares = wanted if num_seqs < wanted and not is_bound else num_seqs + wanted
        plan = Plan(
            tuning,
            torch.empty(num_shares, 4, dtype=torch.int32, device=device),
            torch.empty(min(num_seqs, wanted), 4, dtype=torch.int32, device=device),
            torch.empty(num_shares, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_shares, num_heads, dtype=torch.float32, device=device),
            tile_rows=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
            dim_padded=max(16, triton.next_power_of_2(head_dim)),
            direct=direct,
            early=_launches_early(num_seqs, num_kv_heads, num_sms(device)) and not is_bound,
            merged_at_once=num_heads if _are_split(num_seqs, wanted, is_bound) else num_kv_heads,
        )
        _share_out_kernel[(1,)](
            batch.context_lens,
            plan.shares,
            plan.merges,
            sliding_window or 0,
            num_seqs,
            num_shares,
            plan.merges.shape[0],
            wanted,
            tuning.tile_keys,
            sliding_window is not None,
            max(16, triton.next_power_of_2(num_seqs)),
            num_warps=4,
        )
        batch.plans[key] = plan
    found: Plan = batch.plans[key]
    return found


def _are_split(num_seqs: int, wanted_shares: int, is_bound: bool) -> bool:
    """Whether most sequences have several shares. Otherwise most programs have nothing to merge, and starting many
    would cost more time. With 32 heads, 4 of them KV heads, and 24 sequences of 1126, attention takes 29.2 us on an
    H100 with a program for each head, 32.3 with one for each KV head."""
    return min(num_seqs, wanted_shares) <= MERGED or (2 * num_seqs <= wanted_shares and not is_bound)


def _launches_early(num_decodes: int, num_kv_heads: int, sms: int) -> bool:
    return num_decodes * num_kv_heads < EARLY_BELOW * sms


def _is_direct(query: Tensor, key_cache: Tensor) -> bool:
    """Whether the kernel of `decode_fp8` can compute this. Gluon has no interpreter."""
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    fits = head_dim in DIRECT_HEAD_DIMS and block_size % 16 == 0 and query.shape[1] <= 16 * num_kv_heads
    return fits and query.is_cuda and is_quantized(key_cache) and query.dtype != torch.float32


def tune(
    num_decodes: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, sms: int, is_bound: bool = False
) -> Tuning:
    """The layout for a batch; it must not depend on the contexts, which change under a CUDA graph. `is_bound`: there
    may be fewer decodes, so that each may have to be spread over many programs.

    There are as many programs as fit at once. With 8 KV heads of 128 on an H200, us per layer including its merge;
    reading its keys and values alone takes 261 at 256 x 1144, 130 at 128, 65 at 64, 33 at 32, and 237 at 32 x 8312:

    programs per SM, keys, warps, stages   256 x 1144   128 x 1144   64 x 1144   32 x 1144   32 x 8312   1 x 1144
    4, 16, 1, 6                                   290          151          73          45         252        8.0
    2, 64, 2, 3                                   276          143          75          45         286        7.6
    1, 64, 2, 6                                   279          148          89          41         253        8.4

    With 4 KV heads and 8 sequences of 1144, the first takes 11.5 and the second 14.1; with 4 sequences 9.2 and 10.8,
    with 2 8.9 and 8.5.
    """
    if dtype == torch.float32:
        return Tuning(3 * sms, tile_keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tuning(3 * sms, tile_keys=16, num_warps=2, num_stages=4)
    unsplit = num_decodes * num_kv_heads
    if is_bound:
        return Tuning(4 * sms, tile_keys=16, num_warps=1, num_stages=6)
    if unsplit > 6 * sms:
        return Tuning(2 * sms, tile_keys=64, num_warps=2, num_stages=3)
    if unsplit < 0.1 * sms:
        return Tuning(2 * sms, tile_keys=64, num_warps=2, num_stages=3)
    if 1.9 * sms < unsplit <= 2 * sms:
        return Tuning(sms, tile_keys=64, num_warps=2, num_stages=6)
    return Tuning(4 * sms, tile_keys=16, num_warps=1, num_stages=6)
