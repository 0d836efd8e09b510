"""The arithmetic of quantized keys and values, for the kernels that write and read them. See the package."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_stride(cache_ptr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements between one head of a block and the next."""
    stride = BLOCK_SIZE * HEAD_DIM
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        stride += BLOCK_SIZE
    return stride


@triton.jit
def load_factors(cache_ptr, places, offsets, mask, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The factors, fp32, of tokens at `offsets` in their blocks. cache_ptr: of the head. places: of the blocks."""
    scale_ptr = cache_ptr.to(tl.pointer_type(tl.uint8)) + BLOCK_SIZE * HEAD_DIM
    return factor_of(tl.load(scale_ptr + places + offsets, mask=mask, other=0))


@triton.jit
def dequantized(elements, factors, DTYPE: tl.constexpr):
    """The elements times their factors, exact in bf16. The conversion goes through fp16: a GPU has an instruction for
    that, while Triton's conversion to bf16 is slow."""
    return (elements.to(tl.float16).to(tl.float32) * factors).to(DTYPE)


@triton.jit
def scale_for(peak):
    """The scale, as int32 of an e8m0 byte, for heads whose largest magnitude is `peak`, fp32."""
    scale = ((peak.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(scale, 1), 247)


@triton.jit
def inverse_of(scale):
    """The factor, fp32, by which elements are multiplied before they are stored."""
    return ((254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(scale):
    """The factor, fp32, by which stored elements are multiplied."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
