"""Quantizes rows with one scale each, optionally after a gated activation, as a Triton kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.linear.kernel import gated
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.weights import LARGEST


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x, AXIS: tl.constexpr):
    """The largest magnitude along that axis, which is kept, or of all values. A NaN is larger than any number."""
    return tl.reduce(tl.abs(x), AXIS, _larger, keep_dims=AXIS is not None)


@triton.jit
def store_quantized(x, largest, out_ptrs, scale_ptrs, mask, row_mask, LARGEST: tl.constexpr, ROUND: tl.constexpr):
    """Quantize and store rows. x: fp32. largest: of each row, `largest_of`; a NaN makes the row's scale NaN, because
    int8 has no NaN."""
    largest = _larger(largest, 1e-12)
    tl.store(scale_ptrs, largest / LARGEST, mask=row_mask)
    quantized = x * (LARGEST / largest)  # rounding may exceed LARGEST, but not so far that the cast does
    if ROUND:
        quantized = tl.where(quantized < 0, quantized - 0.5, quantized + 0.5)  # the cast truncates
    tl.store(out_ptrs, quantized.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    column = tl.arange(0, N_PADDED)[None, :]
    mask = column < N
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + row * x_stride + N + column, mask=mask, other=0.0).to(tl.float32)
        x = gated(x, up, ACTIVATION, DTYPE).to(DTYPE).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ptrs = out_ptr + row * N + column
    store_quantized(x, largest_of(x, 1), ptrs, scale_ptr + row, mask, row >= 0, LARGEST, ROUND)


def quantize_rows(x: Tensor, activation: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantized rows, [num_rows, n] of `dtype`, float8_e4m3fn or int8, and their scales, [num_rows, 1], fp32. x:
    [num_rows, n], contiguous rows, or [num_rows, 2 * n] with an activation."""
    num_rows = x.shape[0]
    n = x.shape[1] if activation is None else x.shape[1] // 2
    out = torch.empty((num_rows, n), dtype=dtype, device=x.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        padded = triton.next_power_of_2(n)
        _quantize_rows_kernel[(num_rows,)](
            x, out, scale, x.stride(0), n, padded, LARGEST[dtype], dtype == torch.int8, activation,
            num_warps=max(1, min(16, padded // 1024)), **launch_options(x.device),
        )  # fmt: skip
    return out, scale
