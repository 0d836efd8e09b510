"""The arithmetic of quantized keys and values, for the kernels that write and read them. See the package."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_for(peak):
    """The scale, as int32 of an e8m0 byte, for heads whose largest magnitude is `peak`, fp32."""
    scale = ((peak.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(scale, 1), 247)


@triton.jit
def inverse_of(scale):
    """The factor, fp32, with which elements are stored."""
    return ((254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(scale):
    """The factor, fp32, of stored elements."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
