"""Dequantizes weights, as a Triton kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.weights import FourBitWeight, QuantizedWeight

ROWS = 8
COLUMNS = 256


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    out_features,
    in_features,
    scale_stride,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PACKED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """PACKED_COLUMNS: see `pack_halves`; 0: each value has a byte."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < out_features) & (column < in_features)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PACKED_COLUMNS:
        HALF: tl.constexpr = PACKED_COLUMNS // 2
        within = column % PACKED_COLUMNS
        byte = column // PACKED_COLUMNS * HALF + within % HALF
        codes = tl.load(values_ptr + row * (in_features // 2) + byte, mask=mask, other=0)
        values = ((codes >> (within // HALF * 4).to(tl.uint8)) & 15).to(tl.float32)
    else:
        values = tl.load(values_ptr + row * in_features + column, mask=mask, other=0.0).to(tl.float32)
    group = column // GROUP if GROUP else column * 0
    if HAS_ZERO:
        values -= tl.load(zero_ptr + row * scale_stride + group, mask=mask, other=0).to(tl.float32)
    elif PACKED_COLUMNS:
        values -= 8.0
    scale = tl.load(scale_ptr + row // SCALE_ROWS * scale_stride + group, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * in_features + column, (values * scale).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features] of `dtype`."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.values.device)
    grid = (triton.cdiv(weight.out_features, ROWS), triton.cdiv(weight.in_features, COLUMNS))
    _dequantize_kernel[grid](
        weight.values, weight.scale, out if weight.zero is None else weight.zero, out,
        weight.out_features, weight.in_features, weight.scale.stride(0),
        weight.group, weight.scale_rows, weight.packed_columns if weight.four_bits else 0, weight.zero is not None,
        ROWS, COLUMNS, num_warps=4, **launch_options(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_four_bits_kernel(
    words_ptr,
    scales_ptr,
    out_ptr,
    in_features,
    scale_stride,
    SCALE_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantizes 256 columns of some features, whose bytes are in the order of `FourBitWeight`."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    step = tl.program_id(1)
    column = tl.arange(0, 256)[None, :]
    within = column % 128
    byte = within // 2 % 4 * 32 + within // 64 * 16 + within // 16 % 4 * 4 + within % 2 * 2 + within // 8 % 2
    if PDL:
        tl.extra.cuda.gdc_wait()
    codes = tl.load(words_ptr + row * (in_features // 2) + step * 128 + byte)
    scales = tl.load(scales_ptr + (step * 2 + column // 128) * scale_stride + row)
    values = ((codes >> (column // 128 * 4).to(tl.uint8)) & 15).to(tl.float32) - (scales & 255).to(tl.float32)
    scale = (scales >> 16).to(tl.int16).to(SCALE_DTYPE, bitcast=True).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * in_features + step * 256 + column, (values * scale).to(out_ptr.dtype.element_ty))


def dequantize_four_bits(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features] of `dtype`."""
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.words.device)
    scale_dtype = tl.float16 if weight.scale_dtype == torch.float16 else tl.bfloat16
    _dequantize_four_bits_kernel[(weight.out_features // ROWS, weight.in_features // 256)](
        weight.words.view(torch.uint8), weight.scales, out, weight.in_features, weight.scales.stride(0),
        scale_dtype, ROWS, num_warps=4, **launch_options(out.device),
    )  # fmt: skip
    return out
