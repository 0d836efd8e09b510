"""Matmuls of few rows with quantized weights, in Triton. A weight is read once, as it is stored.

Values are converted to x's dtype in registers; or x is quantized, too, and the tensor cores multiply fp8 by fp8, or
int8 by int8.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.linear.kernel import arrival_counters, gated
from baton_kernels.linear.tiling import MAX_TILES, Tiling
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.weights import QuantizedWeight


@triton.jit
def _nibbles_to_bf16(codes):
    """The low and the high halves of four bytes at a time, each plus 128: 0x4300 is 128, and its last bits are
    units."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 l, h;
        and.b32 l, $4, 0x0f0f0f0f;
        shr.u32 h, $4, 4;
        and.b32 h, h, 0x0f0f0f0f;
        prmt.b32 $0, l, 0x43, 0x4140;
        prmt.b32 $1, l, 0x43, 0x4342;
        prmt.b32 $2, h, 0x43, 0x4140;
        prmt.b32 $3, h, 0x43, 0x4342;
        }
        """,
        "=r,=r,=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _halves(codes, zero, high_zero, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The exact values of the low and of the high halves of bytes. zero: the code of the value 0."""
    if PACKED:
        low, high = _nibbles_to_bf16(codes)
        return low - (zero + 128).to(tl.bfloat16), high - (high_zero + 128).to(tl.bfloat16)
    low = (codes & 15).to(tl.float32) - zero
    high = (codes >> 4).to(tl.float32) - high_zero
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    in_features,
    x_stride,
    scale_stride,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PACKED_COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    X_QUANTIZED: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`weight @ x.T`, as in `linear.kernel`: the many rows of the weight are the tensor cores' M dimension. The last
    dimension of the grid counts blocks of ROWS rows of x.

    PACKED_COLUMNS: see `pack_halves`; 0: each value has a byte. A step has DEPTH columns; with packed values, half of
    them are PACKED_COLUMNS / 2 columns after the others.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    FOUR_BITS: tl.constexpr = PACKED_COLUMNS > 0
    HALF: tl.constexpr = PACKED_COLUMNS // 2
    WIDTH: tl.constexpr = DEPTH // 2 if FOUR_BITS else DEPTH
    tile = tl.program_id(0)
    split = tl.program_id(1)
    share = tl.cdiv(in_features // DEPTH, SPLITS) * DEPTH
    begin = split * share
    end = tl.minimum(in_features, begin + share)
    feature = tile * OUT + tl.arange(0, OUT)
    row = tl.minimum(feature, out_features - 1).to(tl.int64)  # repeat the last row instead of masking
    x_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row_bytes = in_features // 2 if FOUR_BITS else in_features
    first = begin // 2 if FOUR_BITS else begin
    weight_ptrs = weight_ptr + row[:, None] * row_bytes + (first + column)[None, :]
    up_offset = tl.cast(out_features, tl.int64) * row_bytes
    scale_ptrs = scale_ptr + row // SCALE_ROWS * scale_stride
    up_scales = (row + out_features) // SCALE_ROWS * scale_stride - row // SCALE_ROWS * scale_stride
    zero_ptrs = zero_ptr + row * scale_stride
    up_zeros = tl.cast(out_features, tl.int64) * scale_stride
    x_ptrs = x_ptr + x_row[None, :].to(tl.int64) * x_stride + column[:, None]
    x_mask = (x_row < num_rows)[None, :]
    sums = tl.zeros([OUT, ROWS], tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    up_sums = sums
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        low = start
        if FOUR_BITS and DEPTH < PACKED_COLUMNS:
            low = start // PACKED_COLUMNS * PACKED_COLUMNS + start % PACKED_COLUMNS // 2
            low = tl.multiple_of(low, WIDTH)  # else the compiler assumes any number, and loads x value by value
        x = tl.load(x_ptrs + low, mask=x_mask, other=0.0)
        x_high = tl.load(x_ptrs + low + HALF, mask=x_mask, other=0.0) if FOUR_BITS else x
        group = low // GROUP if GROUP else 0
        high_group = (low + HALF) // GROUP if GROUP else 0
        weight = tl.load(weight_ptrs)
        sums = _add_products(
            sums, weight, x, x_high, scale_ptrs, zero_ptrs, group, high_group,
            GROUP, FOUR_BITS, HAS_ZERO, PACKED, X_QUANTIZED, ROWS > 64, DTYPE,
        )  # fmt: skip
        if ACTIVATION is not None:
            weight = tl.load(weight_ptrs + up_offset)
            up_sums = _add_products(
                up_sums, weight, x, x_high, scale_ptrs + up_scales, zero_ptrs + up_zeros, group, high_group,
                GROUP, FOUR_BITS, HAS_ZERO, PACKED, X_QUANTIZED, ROWS > 64, DTYPE,
            )  # fmt: skip
        weight_ptrs += WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sums = sums.to(tl.float32)
    up_sums = up_sums.to(tl.float32)
    if SPLITS > 1:
        block = tile * tl.num_programs(2) + tl.program_id(2)
        cell = tl.arange(0, OUT)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        part_ptrs = part_ptr + block.to(tl.int64) * (SPLITS * OUT * ROWS) + cell
        tl.store(part_ptrs + split * (OUT * ROWS), sums)
        tl.debug_barrier()  # order all threads' stores before the release by one thread
        last = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            tl.store(arrived_ptr + block, 0)  # the next matmul expects zeros
            # Read all parts from memory, in a fixed order, so that the sum does not depend on which program is last.
            sums = tl.load(part_ptrs, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                sums += tl.load(part_ptrs + other * (OUT * ROWS), cache_modifier=".cg")
    else:
        last = True
    if last:
        mask = feature < out_features
        if X_QUANTIZED:
            x_scale = tl.load(x_scale_ptr + x_row, mask=x_row < num_rows, other=0.0)[None, :]
            sums *= x_scale
            up_sums *= x_scale
        if not GROUP:
            sums *= tl.load(scale_ptrs).to(tl.float32)[:, None]
            if ACTIVATION is not None:
                up_sums *= tl.load(scale_ptrs + up_scales).to(tl.float32)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            if HAS_BIAS:
                up_bias = tl.load(bias_ptr + out_features + feature, mask=mask, other=0.0)
                up_sums += up_bias.to(tl.float32)[:, None]
            sums = gated(sums, up_sums, ACTIVATION, DTYPE)
        out_ptrs = out_ptr + x_row[None, :].to(tl.int64) * out_features + feature[:, None]
        tl.store(out_ptrs, sums.to(DTYPE), mask=mask[:, None] & (x_row < num_rows)[None, :])


@triton.jit
def _add_products(
    sums,
    codes,
    x,
    x_high,
    scale_ptrs,
    zero_ptrs,
    group,
    high_group,
    GROUP: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    X_QUANTIZED: tl.constexpr,
    ROUND_SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`sums`, [OUT, ROWS], plus the products of one step.

    ROUND_SCALED: 4-bit values are scaled, and rounded, before their products are summed. With many rows there are too
    few registers for one more tile of sums, which takes 127 us instead of 75 at 128 rows, for gate and up.

    Factors in fp32 are multiplied as they are ("ieee"): by itself, Triton would round them to TF32.
    """
    if FOUR_BITS:
        zero = tl.load(zero_ptrs + group)[:, None].to(tl.float32) if HAS_ZERO else tl.full([1, 1], 8.0, tl.float32)
        high_zero = tl.load(zero_ptrs + high_group)[:, None].to(tl.float32) if HAS_ZERO else zero
        low, high = _halves(codes, zero, high_zero, DTYPE, PACKED)
        if GROUP and ROUND_SCALED:
            low *= tl.load(scale_ptrs + group).to(DTYPE)[:, None]
            high *= tl.load(scale_ptrs + high_group).to(DTYPE)[:, None]
            sums = tl.dot(low, x, sums, input_precision="ieee")
            return tl.dot(high, x_high, sums, input_precision="ieee")
        if GROUP:
            part = tl.dot(low, x, input_precision="ieee")
            high_part = tl.dot(high, x_high, input_precision="ieee")
            sums += part * tl.load(scale_ptrs + group).to(tl.float32)[:, None]
            return sums + high_part * tl.load(scale_ptrs + high_group).to(tl.float32)[:, None]
        sums = tl.dot(low, x, sums, input_precision="ieee")
        return tl.dot(high, x_high, sums, input_precision="ieee")
    values = codes
    if HAS_ZERO:
        values = (codes.to(tl.float32) - tl.load(zero_ptrs + group)[:, None].to(tl.float32)).to(DTYPE)
    elif not X_QUANTIZED:
        values = codes.to(tl.float32).to(DTYPE)
    if GROUP:
        part = tl.dot(values, x, input_precision="ieee")
        return sums + part * tl.load(scale_ptrs + group).to(tl.float32)[:, None]
    return tl.dot(values, x, sums, input_precision="ieee", out_dtype=sums.dtype)


def few_rows(
    x: Tensor,
    x_scale: Tensor | None,
    weight: QuantizedWeight,
    bias: Tensor | None,
    activation: str | None,
    tiling: Tiling,
    dtype: torch.dtype,
) -> Tensor:
    """Return [num_rows, out_features] of `dtype`, or half as many features with an activation.

    x: [num_rows, in_features], contiguous rows, of `dtype`; or of the weight's, with x_scale, [num_rows, 1], in fp32.
    bias: [out_features].
    """
    num_rows, in_features = x.shape
    out_features = weight.out_features if activation is None else weight.out_features // 2
    assert in_features % tiling.depth == 0
    assert not weight.four_bits or weight.packed_columns % tiling.depth == 0
    assert weight.four_bits or not weight.group or weight.group % tiling.depth == 0
    assert x_scale is None or (weight.values.dtype == x.dtype and (not weight.group or x.dtype != torch.int8))
    out = torch.empty((num_rows, out_features), dtype=dtype, device=x.device)
    tiles = triton.cdiv(out_features, tiling.out)
    packed = weight.four_bits and x.is_cuda and x.dtype == torch.bfloat16
    weights = (weight.values, weight.scale, out if weight.zero is None else weight.zero, out if bias is None else bias)
    columns = weight.packed_columns if weight.four_bits else 0
    form = (weight.group, weight.scale_rows, columns, weight.zero is not None, packed)
    row_blocks = triton.cdiv(num_rows, tiling.rows)
    assert tiling.slices == 1
    part, arrived = out, out
    if tiling.splits > 1:
        assert activation is None
        assert tiles * row_blocks <= MAX_TILES
        shape = (tiles * row_blocks, tiling.splits, tiling.out, tiling.rows)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _tile_kernel[(tiles, tiling.splits, row_blocks)](
        x, out if x_scale is None else x_scale, *weights, out, part, arrived,
        num_rows, out_features, in_features, x.stride(0), weight.scale.stride(0), *form, x_scale is not None,
        tiling.rows, tiling.out, tiling.depth, tiling.splits, tiling.num_stages, bias is not None, activation,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out
