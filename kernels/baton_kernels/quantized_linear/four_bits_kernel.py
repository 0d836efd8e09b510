"""Matmuls of few rows with 4-bit weights in groups of 128, in Gluon: codes become numbers in the registers from which
the tensor cores take them.

A step has 256 columns: two groups, whose codes share bytes. `tile_programs` says which warps copy and which multiply.

In any case, a warp has to turn its codes into numbers, which takes 5 logic and 4 floating point instructions for 8
codes. The bits of a code, read as a 16-bit float, are so small that the exponent is 0. Such floats are evenly spaced,
so one exact multiply-add turns them into any multiple of `code - zero`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.four_bits import STEP
from baton_kernels.quantized_linear.tile_programs import Programs, TileTiling, finish, row_of, share, weight_descriptor
from baton_kernels.quantized_linear.weights import FourBitWeight

ROWS_IN_PARTS = 128
"""This many rows of x are copied in two parts: a program's first product begins earlier, and a layer of Llama 3.1 8B
takes an H200 135 us instead of 139."""

# Computes (half - zero) * huge for the low and for the high halves of bytes; 0x7f00 is 2 ** 127 in bf16.
_DECODE_BF16 = gl.constexpr("""
{
    .reg .b32 low, high, shifted, a, b, huge, minus_huge;
    mov.b32 huge, 0x7f007f00;
    mov.b32 minus_huge, 0xff00ff00;
    prmt.b32 low, $9, 0, 0x1010;
    prmt.b32 high, $10, 0, 0x1010;
    shl.b32 high, high, 4;
    mul.rn.bf16x2 low, low, minus_huge;
    mul.rn.bf16x2 high, high, minus_huge;
    shr.u32 shifted, $8, 8;
    and.b32 a, $8, 0x000f000f;
    and.b32 b, shifted, 0x000f000f;
    fma.rn.bf16x2 a, a, huge, low;
    fma.rn.bf16x2 b, b, huge, low;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    and.b32 a, $8, 0x00f000f0;
    and.b32 b, shifted, 0x00f000f0;
    fma.rn.bf16x2 a, a, huge, high;
    fma.rn.bf16x2 b, b, huge, high;
    mov.b32 {$4, $5}, a;
    mov.b32 {$6, $7}, b;
}
""")
# 0x7800 is 2 ** 15 in fp16.
_DECODE_FP16 = gl.constexpr(
    _DECODE_BF16.value.replace("bf16x2", "f16x2").replace("0x7f00", "0x7800").replace("7f00;", "7800;")
    .replace("0xff00ff00", "0xf800f800")
)  # fmt: skip

# A lane has 8 adjacent words of a feature, 32 bytes, and the same words of the feature 8 below.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)


@gluon.jit
def _operand(a, b, c, d, LEFT: gl.constexpr):
    """Join the numbers of words, which are in the order of `four_bits.arrange`, into an operand, [64, 128]."""
    split = gl.join(gl.join(a, b), gl.join(c, d)).reshape([64, 4, 2, 4, 2, 2])
    return gl.convert_layout(split.permute([0, 2, 3, 5, 1, 4]).reshape([64, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _numbers(words, low_scale, high_scale, DTYPE: gl.constexpr):
    """The numbers of a word's 4 low halves and 4 high halves. The lower bits of a scale's word are the zero point."""
    if gl.bfloat16 == DTYPE:
        numbers = gl.inline_asm_elementwise(
            _DECODE_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low_scale[:, None], high_scale[:, None]],
            dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        numbers = gl.inline_asm_elementwise(
            _DECODE_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low_scale[:, None], high_scale[:, None]],
            dtype=(gl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    return numbers


@gluon.jit
def _scale(word, SCALE_DTYPE: gl.constexpr, DTYPE: gl.constexpr, HIGH: gl.constexpr):
    """The scale in a word's upper 16 bits, times the factor by which the numbers are too small."""
    SMALL: gl.constexpr = (4.0 if HIGH else 64.0) if gl.bfloat16 == DTYPE else (32.0 if HIGH else 512.0)
    return (word >> 16).to(gl.int16).to(SCALE_DTYPE, bitcast=True).to(gl.float32) * SMALL


@gluon.jit
def _produce(
    x_desc,
    weight_desc,
    x_buffers,
    weight_buffers,
    full,
    empty,
    num_steps,
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    X_PARTS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Copy the program's codes and rows of x, step by step. Only the first step's codes are copied before the wait for
    x: copying all stages' before it makes a program 1 us slower."""
    first, end = share(num_steps)
    for step in range(first, end):
        turn = step - first
        buffer = turn % STAGES
        mbarrier.wait(empty.index(buffer), ((turn // STAGES) & 1) ^ 1)
        bar = full.index(buffer * X_PARTS)
        mbarrier.expect(bar, ROWS * 512 // X_PARTS + GROUPS * 8192)
        for group in gl.static_range(GROUPS):
            eighth = (gl.program_id(1) * GROUPS + group) * (4 if GATED else 8)
            target = weight_buffers.index(buffer * GROUPS + group)
            tma.async_copy_global_to_shared(weight_desc, [eighth, 0, 0, step * 32], bar, target)
        if PDL and step == first:
            gdc_wait()
        for part in gl.static_range(X_PARTS):
            if part:
                bar = full.index(buffer * X_PARTS + part)
                mbarrier.expect(bar, ROWS * 512 // X_PARTS)
            column = step * 4 + part * (4 // X_PARTS)
            target = x_buffers.index(buffer * X_PARTS + part)
            tma.async_copy_global_to_shared(x_desc, [column, gl.program_id(0) * ROWS, 0], bar, target)


@gluon.jit
def _consume(
    x_buffers,
    weight_buffers,
    full,
    empty,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_steps,
    num_rows,
    out_features,
    scale_stride,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    X_PARTS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """GROUP: the number of this group of warps, which has its own features of a tile. The next scales are loaded while
    the current ones are used.

    The place of these loads was chosen by measurement: with 1, 16, 32, and 64 rows, qkv, o, gate_up, and down together
    take 47, 49, 65, and 87 us with the loads before the wait, and 50, 52, 63, and 81 after it.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    FEATURES: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    xs = x_buffers._reinterpret(DTYPE, [2 * STAGES, ROWS, 128], gl.NVMMASharedLayout(128, 16, 2))
    weights = weight_buffers._reinterpret(gl.int32, [STAGES * GROUPS, 64, 32], gl.NVMMASharedLayout(128, 32, 2))
    nothing = gl.zeros([64, ROWS], gl.float32, PRODUCT)
    first, end = share(num_steps)
    own = gl.program_id(1) * GROUPS + GROUP
    scales = scale_ptr + row_of(own, gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS)), out_features, GATED)
    next_low = gl.load(scales + 2 * first * scale_stride)
    next_high = gl.load(scales + (2 * first + 1) * scale_stride)
    sums = nothing
    for step in range(first, end):
        turn = step - first
        buffer = turn % STAGES
        low_scale, high_scale = next_low, next_high
        following = gl.minimum(step + 1, end - 1)
        if ROWS >= 32:
            mbarrier.wait(full.index(buffer * X_PARTS), (turn // STAGES) & 1)
        next_low = gl.load(scales + 2 * following * scale_stride)
        next_high = gl.load(scales + (2 * following + 1) * scale_stride)
        if ROWS < 32:
            mbarrier.wait(full.index(buffer * X_PARTS), (turn // STAGES) & 1)
        words = weights.index(buffer * GROUPS + GROUP).load(_WORDS)
        a, b, c, d, e, f, g, h = _numbers(words, low_scale, high_scale, DTYPE)
        low, high = _operand(a, b, c, d, LEFT), _operand(e, f, g, h, LEFT)
        x, high_x = xs.index(2 * buffer).permute([1, 0]), xs.index(2 * buffer + 1).permute([1, 0])
        low_factor = gl.convert_layout(_scale(low_scale, SCALE_DTYPE, DTYPE, False), FEATURES, assert_trivial=True)
        high_factor = gl.convert_layout(_scale(high_scale, SCALE_DTYPE, DTYPE, True), FEATURES, assert_trivial=True)
        if ROWS == 8:  # with more rows, having both under way takes 5 to 9% longer
            part = warpgroup_mma(low, x, nothing, use_acc=False, is_async=True)
            high_part = warpgroup_mma(high, high_x, nothing, use_acc=False, is_async=True)
            part, high_part, low, high = warpgroup_mma_wait(0, deps=[part, high_part, low, high])
            sums += part * low_factor[:, None] + high_part * high_factor[:, None]
        else:
            sums += warpgroup_mma(low, x, nothing, use_acc=False) * low_factor[:, None]
            if X_PARTS == 2:
                mbarrier.wait(full.index(2 * buffer + 1), (turn // STAGES) & 1)
            sums += warpgroup_mma(high, high_x, nothing, use_acc=False) * high_factor[:, None]
        debug_barrier()  # one thread arrives for all
        mbarrier.arrive(empty.index(buffer), count=1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    finish(
        sums, bias_ptr, out_ptr, part_ptr, arrived_ptr, own, num_rows, out_features, ROWS, SPLIT, HAS_BIAS, ACTIVATION
    )


@gluon.jit(do_not_specialize=["num_steps", "num_rows", "out_features", "scale_stride"])
def _four_bits_kernel(
    x_desc,
    weight_desc,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_steps,
    num_rows,
    out_features,
    scale_stride,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    X_PARTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    SCALE_DTYPE: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """X_PARTS: in how many copies a step's columns of x arrive. REGISTERS: of a thread in the second group of warps."""
    GATED: gl.constexpr = ACTIVATION is not None
    EIGHTHS: gl.constexpr = 4 if GATED else 8
    x_buffers = gl.allocate_shared_memory(
        out_ptr.dtype.element_ty, [STAGES * X_PARTS, 4 // X_PARTS, ROWS, 64], x_desc.layout
    )
    weight_buffers = gl.allocate_shared_memory(
        gl.int32, [STAGES * GROUPS, EIGHTHS, 8 // EIGHTHS, 8, 32], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES * X_PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(X_PARTS):
            mbarrier.init(full.index(stage * X_PARTS + part), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    x_buffers, weight_buffers, full, empty, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
                    num_steps, num_rows, out_features, scale_stride,
                    0, GROUPS, ROWS, STAGES, X_PARTS, SCALE_DTYPE, SPLIT, HAS_BIAS, ACTIVATION, PDL,
                )),
                (_produce, (
                    x_desc, weight_desc, x_buffers, weight_buffers, full, empty, num_steps,
                    ROWS, GROUPS, STAGES, X_PARTS, GATED, PDL,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    x_buffers, weight_buffers, full, empty, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
                    num_steps, num_rows, out_features, scale_stride,
                    0, GROUPS, ROWS, STAGES, X_PARTS, SCALE_DTYPE, SPLIT, HAS_BIAS, ACTIVATION, PDL,
                )),
                (_consume, (
                    x_buffers, weight_buffers, full, empty, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
                    num_steps, num_rows, out_features, scale_stride,
                    1, GROUPS, ROWS, STAGES, X_PARTS, SCALE_DTYPE, SPLIT, HAS_BIAS, ACTIVATION, PDL,
                )),
                (_produce, (
                    x_desc, weight_desc, x_buffers, weight_buffers, full, empty, num_steps,
                    ROWS, GROUPS, STAGES, X_PARTS, GATED, PDL,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip


def choose(num_rows: int, gated: bool) -> TileTiling:
    """Shared memory holds `stages` stages of 512 bytes per row of x and 8192 per group. With one more stage, 8 rows
    take 3% longer: the next kernel's programs, which start while these end, have no room.

    Timed as in `tiling`, for 1, 16, 32, 64, and 128 rows: 7.0, 5.6, 22.1, 12.5; 7.4, 6.6, 21.9, 12.6; 10.0, 8.0, 26.3,
    16.7; 13.0, 11.1, 36.1, 20.8; 22.0, 19.5, 53.6, 34.9.
    """
    rows = min(128, max(8, triton.next_power_of_2(num_rows)))
    if rows <= 16:
        return TileTiling(rows, 1, stages=3, programs=4, registers=64, least_steps=2)
    if rows == 32 and gated:
        return TileTiling(rows, 2, stages=3, programs=2, registers=80, least_steps=4)
    if rows == 32:
        return TileTiling(rows, 1, stages=3, programs=3, registers=80, least_steps=5)
    if rows == 64:
        return TileTiling(rows, 1, stages=2, programs=2, registers=128, least_steps=4)
    return TileTiling(rows, 2, stages=2, programs=1, registers=168, least_steps=4)


def few_rows(x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return [num_rows, out_features] of x's dtype, or half as many features with an activation.

    x: [num_rows, in_features], bf16 or fp16, rows of contiguous elements, aligned to 16 bytes. bias: [out_features].
    """
    num_rows, in_features = x.shape
    tiling = choose(num_rows, activation is not None)
    programs = Programs.of(num_rows, weight.out_features, in_features // STEP, activation, tiling, x.device, x.dtype)
    x_parts = 2 if tiling.rows == ROWS_IN_PARTS else 1
    x_desc = TensorDescriptor(
        x, [in_features // 64, num_rows, 64], [64, x.stride(0), 1], [4 // x_parts, tiling.rows, 64],
        gl.NVMMASharedLayout(128, 16, 3),
    )  # fmt: skip
    weight_desc = weight_descriptor(weight.words, activation is not None, 32)
    _four_bits_kernel[programs.grid](
        x_desc, weight_desc, weight.scales, programs.out if bias is None else bias, *programs.tensors,
        in_features // STEP, num_rows, programs.out.shape[1], weight.scales.stride(0),
        tiling.groups, tiling.rows, tiling.stages, x_parts, tiling.registers_of_second,
        gl.bfloat16 if weight.scale_dtype == torch.bfloat16 else gl.float16, programs.splits > 1, bias is not None,
        activation, num_warps=4, maxnreg=tiling.registers, **launch_options(x.device),
    )  # fmt: skip
    return programs.out
