"""Decodes MXFP4 weights and 4-bit integers in registers, on their way into products, in Triton.

A thread takes the 16 bytes of 32 columns, which share a scale, so that it reads the scale once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _values(codes):
    """The fp32 values of e2m1 codes in the low halves of bytes. A code's bits become the last bits of a float's
    exponent and the first of its mantissa, with the sign before them. Such a float is 2**126 times too small, and 0.5
    is subnormal, as it is in e2m1."""
    code = codes.to(tl.uint32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _powers_of_two(scale):
    """The fp32 values of e8m0 scales, which are the bits of an exponent; 2**-127 is subnormal."""
    bits = tl.where(scale == 255, 0x7FC00000, tl.maximum(scale.to(tl.int32) << 23, 1 << 22))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_groups(codes_ptr, scale_ptr, group, mask, INTEGERS: tl.constexpr):
    """The values of the even and of the odd columns in groups of 32, [..., 16] each, and the scales to multiply them
    by, [..., 1]; zeros where masked. group: [...], int64, the groups' numbers, counted from the first column of the
    tensor. INTEGERS: how many columns of 4-bit integers share a scale; 0: MXFP4."""
    byte = tl.expand_dims(group, -1) * 16 + tl.arange(0, 16)
    codes = tl.load(codes_ptr + byte, mask=tl.expand_dims(mask, -1), other=0)
    if INTEGERS:
        word = tl.load(scale_ptr + group // (INTEGERS // 32), mask=mask, other=0)
        scale = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = tl.expand_dims((word & 0xFFFF).to(tl.float32), -1)
        return (codes & 15).to(tl.float32) - zero, (codes >> 4).to(tl.float32) - zero, tl.expand_dims(scale, -1)
    scale = tl.load(scale_ptr + group, mask=mask, other=0)
    return _values(codes & 15), _values(codes >> 4), tl.expand_dims(_powers_of_two(scale), -1)


@triton.jit
def load_weight(
    codes_ptr,
    scale_ptr,
    row,
    begin,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    INTEGERS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Columns `begin` to `begin + DEPTH` of these rows, as [rows, DEPTH] of DTYPE; zeros beyond COLUMNS. row: [rows],
    int64."""
    within = begin // 32 + tl.arange(0, DEPTH // 32)
    group = row[:, None] * (COLUMNS // 32) + within[None, :]
    even, odd, scale = load_groups(codes_ptr, scale_ptr, group, (within < COLUMNS // 32)[None, :], INTEGERS)
    return tl.join((even * scale).to(DTYPE), (odd * scale).to(DTYPE)).reshape(row.shape[0], DEPTH)
