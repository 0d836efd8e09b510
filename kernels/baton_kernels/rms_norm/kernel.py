"""rms_norm as a Triton kernel: one read and one write of each row, or of a tile of short rows, per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.experts.sum_kernel import sum_of_parts
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear import QuantizedRows
from baton_kernels.quantized_linear.quantize_rows_kernel import largest_of, store_quantized
from baton_kernels.quantized_linear.weights import LARGEST
from baton_kernels.unfinished import ChosenParts, Left, Scales

TILE = 2048  # elements per program of short rows: 4 warps with two 16-byte accesses per thread
PARTS_REGISTERS = 128
"""Per thread, of norms that sum parts. Without a number the compiler aims at 32, and so loads two parts at a time."""


@triton.jit
def normed(x, squares, weight, eps, N: tl.constexpr, ROUND_ONCE: tl.constexpr, DTYPE: tl.constexpr):
    """The normed rows of N values. x: fp32. squares: the sum of each row's squares. weight: including its offset,
    fp32."""
    x *= tl.rsqrt(squares * (1.0 / N) + eps)
    if not ROUND_ONCE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows", "num_inner"], do_not_specialize_on_alignment=["ids_ptr", "slot_mapping_ptr"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    quantized_ptr,
    scale_ptr,
    row_scale_ptr,
    column_scale_ptr,
    ids_ptr,
    slot_mapping_ptr,
    outer_stride,
    inner_stride,
    num_rows,
    num_inner,
    eps,
    weight_offset,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    FLAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOP_K: how many rows of x, the parts of a token, are summed first; 0: none. LARGEST: what a row's largest value
    becomes when it is quantized; 0: rows are not quantized."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, N_PADDED)[None, :]
    mask = (row < num_rows) & (column < N)
    # No kernel writes the weight or a product's scales of columns, so they are loaded before the wait. Each row loads
    # them again, in the layout of the rows.
    weight = (
        tl.load(tl.broadcast_to(weight_ptr + column, (ROWS, N_PADDED)), mask=mask, other=0.0).to(tl.float32)
        + weight_offset
    )
    if HAS_SCALES:
        scale = tl.load(tl.broadcast_to(column_scale_ptr + column, (ROWS, N_PADDED)), mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offset = row.to(tl.int64) * N + column
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if FLAT:
        x_offset = row.to(tl.int64) * outer_stride + column
    else:
        x_offset = (row // num_inner).to(tl.int64) * outer_stride + (row % num_inner) * inner_stride + column
    if TOP_K:
        token, real = row.to(tl.int64), row < num_rows
        x = sum_of_parts(
            x_ptr, ids_ptr, slot_mapping_ptr, token, column, real, mask, N, TOP_K, NUM_EXPERTS, HAS_PADDING, True
        )
        x = x.to(DTYPE).to(tl.float32)  # as a kernel that only sums would round it
    else:
        x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        x *= scale * tl.load(row_scale_ptr + row, mask=row < num_rows, other=0.0)
    if HAS_RESIDUAL:
        x += residual
        rounded = x.to(DTYPE)
        tl.store(residual_ptr + offset, rounded, mask=mask)
        x = rounded.to(tl.float32)
    out = normed(x, tl.sum(x * x, axis=1, keep_dims=True), weight, eps, N, ROUND_ONCE, DTYPE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + offset, out, mask=mask)
    if LARGEST:
        out = out.to(tl.float32)
        ptrs = quantized_ptr + offset
        store_quantized(out, largest_of(out, 1), ptrs, scale_ptr + row, mask, row < num_rows, LARGEST, ROUND)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    weight_offset: float,
    round_once: bool,
    quantized: QuantizedRows | None = None,
    left: Left | None = None,
) -> Tensor:
    """quantized: tensors for the result's rows, quantized as by `quantize_rows`, and for their scales. left: what is
    still to be done to x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.shape[-1]
    num_rows = x.numel() // n
    if num_rows == 0:
        return out
    num_inner, outer_stride, inner_stride = _row_strides(x)
    chosen = left if isinstance(left, ChosenParts) else None
    scales = left if isinstance(left, Scales) else None
    slot_mapping = None if chosen is None else chosen.slot_mapping
    padded = triton.next_power_of_2(n)
    rows = max(1, TILE // padded)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x if chosen is None else chosen.parts,
        x if residual is None else residual,
        weight,
        out,
        *(quantized or (out, out)),
        *(scales or (out, out)),
        out if chosen is None else chosen.ids,
        out if slot_mapping is None else slot_mapping,
        outer_stride,
        inner_stride,
        num_rows,
        num_inner,
        eps,
        weight_offset,
        n,
        padded,
        rows,
        residual is not None,
        scales is not None,
        0 if chosen is None else chosen.top_k,
        0 if chosen is None else chosen.num_experts,
        slot_mapping is not None,
        round_once,
        num_inner == 1,
        0 if quantized is None else LARGEST[quantized[0].dtype],
        quantized is not None and quantized[0].dtype == torch.int8,
        num_warps=min(16, rows * padded // 512),
        maxnreg=None if chosen is None else PARTS_REGISTERS,
        **launch_options(x.device),
    )
    return out


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """(num_inner, outer_stride, inner_stride): row r lies at `r // num_inner * outer + r % num_inner * inner`.

    The two forms are compiled separately, and torch calls one token's heads contiguous where those of two tokens are
    not. So 4-D inputs, the form in which models pass the heads of a batch, are never treated as dense.
    """
    shape, strides = x.shape, x.stride()
    dense = all(strides[i] == shape[i + 1] * strides[i + 1] for i in range(len(shape) - 1))
    if len(shape) == 2 or (dense and len(shape) < 4):
        return 1, strides[-2] if len(shape) > 1 else shape[0], 0
    assert all(size == 1 for size in shape[:-3]), "rows have at most two strides"
    return shape[-2], strides[-3], strides[-2]
