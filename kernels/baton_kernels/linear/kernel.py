"""Matmuls of few rows in Triton. Each weight is read once, so memory bandwidth is all that counts.

No weight is loaded before the wait for the previous kernel, though no kernel writes weights. On an H200, prefetching 8
MB of each weight into L2 changed the time of a decode step by -0.6 to +1.5 percent, 32 MB by +2 to +3: the small
kernels before the matmul then queue for memory behind its weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.gated_activation.kernel import activated
from baton_kernels.linear.tiling import MAX_TILES, RowTiling, Tiling
from baton_kernels.pdl import launch_options


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gate) * up in fp32; gate, up and the activation are rounded as separate operations would round
    them."""
    rounded = activated(gate.to(DTYPE).to(tl.float32), ACTIVATION).to(DTYPE).to(tl.float32)
    return rounded * up.to(DTYPE).to(tl.float32)


@triton.jit
def load_columns(ptrs, mask, EVEN: tl.constexpr):
    """Load columns. EVEN: all of them exist; else masked ones are zeros."""
    if EVEN:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    in_features,
    weight_stride,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x; fp32 products and sums. EVEN: in_features is a multiple of DEPTH.

    Weights go through shared memory although each is used once: that way STAGES sets how many loads run ahead of the
    products, rather than the compiler's instruction order (28 us against 32 for the same loop).
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    feature = tl.program_id(0) * OUT + tl.arange(0, OUT)
    mask = feature < out_features
    column = tl.arange(0, DEPTH)
    row = tl.minimum(feature, out_features - 1).to(tl.int64)  # repeat the last row instead of masking
    weight_ptrs = weight_ptr + row[:, None] * weight_stride + column[None, :]
    x_ptrs = x_ptr + column
    up_offset = tl.cast(out_features, tl.int64) * weight_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([OUT, DEPTH], tl.float32)
    up_sums = tl.zeros([OUT, DEPTH], tl.float32)
    for k in tl.range(0, in_features, DEPTH, num_stages=STAGES):
        weight = load_columns(weight_ptrs, (column < in_features - k)[None, :], EVEN)
        x = load_columns(x_ptrs, column < in_features - k, EVEN).to(tl.float32)[None, :]
        sums += weight.to(tl.float32) * x
        if ACTIVATION is not None:
            up = load_columns(weight_ptrs + up_offset, (column < in_features - k)[None, :], EVEN)
            up_sums += up.to(tl.float32) * x
        weight_ptrs += DEPTH
        x_ptrs += DEPTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out = tl.sum(sums, 1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up_out = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up_out += tl.load(bias_ptr + out_features + feature, mask=mask, other=0.0).to(tl.float32)
        out = gated(out, up_out, ACTIVATION, DTYPE)
    tl.store(out_ptr + feature, out.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`weight @ x.T`: the many rows of the weight are the tensor cores' M dimension. EVEN: in_features is a multiple of
    DEPTH.

    Tiles have a leading dimension of SLICES, which splits a step's columns among the warps. With an activation the
    weight has `2 * out_features` rows.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = DEPTH // SLICES
    tile = tl.program_id(0)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(in_features, DEPTH), SPLITS) * DEPTH
    begin = split * share
    end = tl.minimum(in_features, begin + share)
    feature = tile * OUT + tl.arange(0, OUT)
    weight_row = tl.minimum(feature, out_features - 1).to(tl.int64)  # repeat the last row instead of masking
    x_row = tl.arange(0, ROWS)
    column = begin + tl.arange(0, WIDTH)
    if SLICES == 1:
        weight_ptrs = weight_ptr + weight_row[:, None] * weight_stride + column[None, :]
        x_ptrs = x_ptr + x_row[None, :].to(tl.int64) * x_stride + column[:, None]
        x_mask = (x_row < num_rows)[None, :]
        weight_column, x_column = column[None, :], column[:, None]
        sums = tl.zeros([OUT, ROWS], tl.float32)
    else:
        skipped = tl.arange(0, SLICES)[:, None, None] * WIDTH
        weight_ptrs = weight_ptr + weight_row[None, :, None] * weight_stride + (skipped + column[None, None, :])
        x_ptrs = x_ptr + x_row[None, None, :].to(tl.int64) * x_stride + (skipped + column[None, :, None])
        x_mask = (x_row < num_rows)[None, None, :]
        weight_column, x_column = skipped + column[None, None, :], skipped + column[None, :, None]
        sums = tl.zeros([SLICES, OUT, ROWS], tl.float32)
    up_sums = sums
    up_offset = tl.cast(out_features, tl.int64) * weight_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(begin, end, DEPTH, num_stages=STAGES):
        inside = weight_column < end - (k - begin)
        weight = load_columns(weight_ptrs, inside, EVEN)
        x = tl.load(x_ptrs, mask=x_mask if EVEN else x_mask & (x_column < end - (k - begin)), other=0.0)
        sums = tl.dot(weight, x, sums)
        if ACTIVATION is not None:
            up_sums = tl.dot(load_columns(weight_ptrs + up_offset, inside, EVEN), x, up_sums)
        weight_ptrs += DEPTH
        x_ptrs += DEPTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SLICES > 1:
        sums = tl.sum(sums, 0)
        up_sums = tl.sum(up_sums, 0)
    if SPLITS > 1:
        cell = tl.arange(0, OUT)[:, None] * ROWS + x_row[None, :]
        part_ptrs = part_ptr + tile.to(tl.int64) * (SPLITS * OUT * ROWS) + cell
        tl.store(part_ptrs + split * (OUT * ROWS), sums)
        tl.debug_barrier()  # order all threads' stores before the release by one thread
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            tl.store(arrived_ptr + tile, 0)  # the next matmul expects zeros
            # Read all parts from memory, in a fixed order, so that the sum does not depend on which program is last.
            sums = tl.load(part_ptrs, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                sums += tl.load(part_ptrs + other * (OUT * ROWS), cache_modifier=".cg")
    else:
        last = True
    if last:
        mask = feature < out_features
        if HAS_BIAS:
            sums += tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            if HAS_BIAS:
                up_bias = tl.load(bias_ptr + out_features + feature, mask=mask, other=0.0)
                up_sums += up_bias.to(tl.float32)[:, None]
            sums = gated(sums, up_sums, ACTIVATION, DTYPE)
        out_ptrs = out_ptr + x_row[None, :].to(tl.int64) * out_features + feature[:, None]
        tl.store(out_ptrs, sums.to(DTYPE), mask=mask[:, None] & (x_row < num_rows)[None, :])


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, tiling: RowTiling | Tiling
) -> Tensor:
    """Return [num_rows, out_features], or half as many features with an activation.

    x: [num_rows, in_features], weight: [out_features, in_features], bias: [out_features]; one dtype, contiguous rows.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0] if activation is None else weight.shape[0] // 2
    is_even = in_features % tiling.depth == 0
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(out_features, tiling.out)
    bias_ptr = weight if bias is None else bias
    if isinstance(tiling, RowTiling):
        assert num_rows == 1
        _row_kernel[(tiles,)](
            x, weight, bias_ptr, out, out_features, in_features, weight.stride(0),
            tiling.out, tiling.depth, tiling.num_stages, is_even, bias is not None, activation,
            num_warps=tiling.num_warps, **launch_options(x.device),
        )  # fmt: skip
        return out
    assert num_rows <= tiling.rows
    part, arrived = out, out
    if tiling.splits > 1:
        assert activation is None
        assert tiles <= MAX_TILES
        part = torch.empty((tiles, tiling.splits, tiling.out, tiling.rows), dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _tile_kernel[(tiles, tiling.splits)](
        x, weight, bias_ptr, out, part, arrived, num_rows, out_features, in_features, x.stride(0), weight.stride(0),
        tiling.rows, tiling.out, tiling.depth, tiling.slices, tiling.splits, tiling.num_stages,
        is_even, bias is not None, activation,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out


_ARRIVED: dict[torch.device, Tensor] = {}


def arrival_counters(device: torch.device) -> Tensor:
    """[MAX_TILES], int32: how many splits of a tile are done; every launch resets it to zeros.

    All matmuls of a device share it, so they must run one after another, on one stream at a time.
    """
    if device not in _ARRIVED:
        zeros = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return zeros  # owned by the graph and zeroed at each replay; not shared with other launches
        _ARRIVED[device] = zeros
    return _ARRIVED[device]
