"""Matmuls of few rows with 4-bit weights in groups of 128: codes go from memory through registers into tensor cores.

As in `paged_attention.decode_fp8`, a thread takes 16 adjacent bytes, and the order of what a product sums over is that
in which it has them; x is loaded in the same order. Through shared memory, as Triton has it, codes take twice as long.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton_kernels.linear.kernel import arrival_counters, gated
from baton_kernels.linear.tiling import MAX_TILES
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.weights import QuantizedWeight

OUT = 64
"""Features of a program: 16 of each of its 4 warps."""
STEP = 256
"""Columns of a turn: two groups, whose codes share bytes."""
STAGES = gl.constexpr(3)
"""Buffers for steps of x."""
MAX_ROWS = 32

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT.value, 2))
_FEATURES = gl.constexpr(gl.SliceLayout(1, _PRODUCT.value))

# A lane has 4 adjacent words of a feature, 16 bytes, and the same of the feature 8 below, and of both 64 bytes on.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
# A lane has the columns of x that it has of the weight.
_COLUMNS = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [0, 128]]
_LANES = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
_EVERY_WARP = [[0, 0], [0, 0]]
_X_8 = gl.constexpr(gl.DistributedLinearLayout(_COLUMNS, _LANES, _EVERY_WARP, [], [8, 256]))
_X_16 = gl.constexpr(gl.DistributedLinearLayout([*_COLUMNS, [8, 0]], _LANES, _EVERY_WARP, [], [16, 256]))
_X_32 = gl.constexpr(gl.DistributedLinearLayout([*_COLUMNS, [8, 0], [16, 0]], _LANES, _EVERY_WARP, [], [32, 256]))

# Without conflicts of banks where lanes read 16 bytes each, in the order above.
_SHARED_X = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_X_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))

# The low and the high halves of a word's bytes, less a zero that is the same for two: 0x4300 is 128 in bf16, and its
# last bits count ones.
_DECODE = gl.constexpr("""
{
    .reg .b32 low, high, a, b;
    and.b32 low, $8, 0x0f0f0f0f;
    shr.u32 high, $8, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 a, low, 0x43, 0x4140;
    prmt.b32 b, low, 0x43, 0x4342;
    sub.rn.bf16x2 a, a, $9;
    sub.rn.bf16x2 b, b, $9;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    prmt.b32 a, high, 0x43, 0x4140;
    prmt.b32 b, high, 0x43, 0x4342;
    sub.rn.bf16x2 a, a, $10;
    sub.rn.bf16x2 b, b, $10;
    mov.b32 {$4, $5}, a;
    mov.b32 {$6, $7}, b;
}
""")


@gluon.jit
def _weight_operand(a, b, c, d):
    """[64, 128], bf16, of the elements of words."""
    split = gl.join(gl.join(a, b), gl.join(c, d)).reshape([64, 2, 4, 4, 2, 2])
    return gl.convert_layout(split.permute([0, 1, 3, 5, 2, 4]).reshape([64, 128]), _LEFT, assert_trivial=True)


@gluon.jit
def _x_operand(half, ROWS: gl.constexpr):
    """[128, ROWS], in the order of `_weight_operand`."""
    split = half.reshape([ROWS, 2, 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape([ROWS, 128])
    return gl.convert_layout(split.permute([1, 0]), _RIGHT, assert_trivial=True)


@gluon.jit
def _zeros_of(zero_ptr, row, step, stride, HAS_ZERO: gl.constexpr):
    """Zeros of both groups of a step, plus 128, twice in a word: two tensors [64], int32."""
    if HAS_ZERO:
        low = gl.load(zero_ptr + row * stride + 2 * step).to(gl.int32)
        high = gl.load(zero_ptr + row * stride + 2 * step + 1).to(gl.int32)
        return (0x4300 + low) * 0x10001, (0x4300 + high) * 0x10001
    plain = gl.full([64], 0x43084308, gl.int32, gl.SliceLayout(1, _WORDS))
    return plain, plain


@gluon.jit
def _add_products(sums, words, low_zero, high_zero, low_scale, high_scale, x_low, x_high, ROWS: gl.constexpr):
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _DECODE,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [words, low_zero[:, None], high_zero[:, None]],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    nothing = gl.zeros([64, ROWS], gl.float32, _PRODUCT)
    sums += mma_v2(_weight_operand(a, b, c, d), x_low, nothing) * low_scale.to(gl.float32)[:, None]
    return sums + mma_v2(_weight_operand(e, f, g, h), x_high, nothing) * high_scale.to(gl.float32)[:, None]


@gluon.jit
def _sum_of_parts(part_ptrs, SPLITS: gl.constexpr, STRIDE: gl.constexpr):
    """Reads all parts from memory, in a fixed order, so that the sum does not depend on which program is last."""
    sums = gl.load(part_ptrs, cache_modifier=".cg")
    for other in gl.static_range(1, SPLITS):
        sums += gl.load(part_ptrs + other * STRIDE, cache_modifier=".cg")
    return sums


@gluon.jit(do_not_specialize=["num_rows"])
def _four_bits_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    row_words,
    x_stride,
    scale_stride,
    HAS_ZERO: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """With an activation, the features of up follow `out_features` of the gate, and are summed beside them.

    Many rows of x go through shared memory, from which all warps read them: read by each warp, 32 rows take a fifth
    longer. Fewer rows take as long either way, and so do words, which only one lane reads.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    STAGED: gl.constexpr = ROWS == 32
    X: gl.constexpr = _X_8 if ROWS == 8 else _X_16 if ROWS == 16 else _X_32
    tile = gl.program_id(0)
    split = gl.program_id(1)
    num_steps = row_words // 32
    share = gl.cdiv(num_steps, SPLITS)
    first = split * share
    end = gl.minimum(num_steps, first + share)

    feature = tile * 64 + gl.arange(0, 64, layout=_FEATURES)
    row = gl.minimum(feature, out_features - 1)  # repeat the last row instead of masking
    word_feature = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS))
    word_row = gl.minimum(word_feature, out_features - 1)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, _WORDS))[None, :]
    weights = weight_ptr.to(gl.pointer_type(gl.int32)) + word_row.to(gl.int64)[:, None] * row_words + word
    scales = scale_ptr + row.to(gl.int64) * scale_stride
    zero_row = word_row.to(gl.int64)
    x_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, X))
    x_column = gl.arange(0, 256, layout=gl.SliceLayout(0, X))
    xs = x_ptr + x_row.to(gl.int64)[:, None] * x_stride + x_column[None, :]
    x_mask = (x_row < num_rows)[:, None]

    ups = weights + out_features.to(gl.int64) * row_words
    up_scales = scales + out_features.to(gl.int64) * scale_stride
    sums = gl.zeros([64, ROWS], gl.float32, _PRODUCT)
    up_sums = sums
    begin = gl.minimum(first, num_steps - 1) * 32
    words = gl.load(weights + begin, eviction_policy="evict_first")
    up_words = gl.load(ups + begin, eviction_policy="evict_first") if GATED else words
    if PDL:
        gdc_wait()
    if STAGED:
        x_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 256], _SHARED_X)
        copy_row = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(1, _X_COPY)), num_rows - 1)
        copy_column = gl.arange(0, 256, layout=gl.SliceLayout(0, _X_COPY))
        copied = x_ptr + copy_row.to(gl.int64)[:, None] * x_stride + copy_column[None, :]
        for ahead in gl.static_range(STAGES - 1):
            if first + ahead < end:
                async_copy.async_copy_global_to_shared(x_buffers.index(ahead), copied + (first + ahead) * 256)
            async_copy.commit_group()
    for step in range(first, end):
        if STAGED:
            async_copy.wait_group(STAGES - 2)
            x = x_buffers.index((step - first) % STAGES).load(X)
        else:
            x = gl.load(xs + step * 256, mask=x_mask, other=0.0)
        low, high = gl.split(x.reshape([ROWS, 2, 128]).permute([0, 2, 1]))
        x_low = _x_operand(low, ROWS)
        x_high = _x_operand(high, ROWS)
        low_scale = gl.load(scales + 2 * step)
        high_scale = gl.load(scales + 2 * step + 1)
        low_zero, high_zero = _zeros_of(zero_ptr, zero_row, step, scale_stride, HAS_ZERO)
        following = gl.minimum(step + 1, end - 1) * 32
        next_words = gl.load(weights + following, eviction_policy="evict_first")
        sums = _add_products(sums, words, low_zero, high_zero, low_scale, high_scale, x_low, x_high, ROWS)
        words = next_words
        if GATED:
            low_scale = gl.load(up_scales + 2 * step)
            high_scale = gl.load(up_scales + 2 * step + 1)
            low_zero, high_zero = _zeros_of(zero_ptr, zero_row + out_features, step, scale_stride, HAS_ZERO)
            next_words = gl.load(ups + following, eviction_policy="evict_first")
            up_sums = _add_products(up_sums, up_words, low_zero, high_zero, low_scale, high_scale, x_low, x_high, ROWS)
            up_words = next_words
        if STAGED:
            later = step + STAGES - 1
            if later < end:
                buffer = x_buffers.index((later - first) % STAGES)
                async_copy.async_copy_global_to_shared(buffer, copied + later * 256)
            async_copy.commit_group()  # also an empty one: waits count groups
    if PDL:
        gdc_launch_dependents()

    column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, _PRODUCT))
    last = True
    if SPLITS > 1:
        PART: gl.constexpr = 64 * ROWS
        parts = part_ptr + tile.to(gl.int64) * ((2 if GATED else 1) * SPLITS * PART)
        parts += gl.arange(0, 64, layout=_FEATURES)[:, None] * ROWS + column[None, :]
        gl.store(parts + split * PART, sums)
        if GATED:
            gl.store(parts + (SPLITS + split) * PART, up_sums)
        debug_barrier()  # order all threads' stores before the release by one thread
        last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            gl.store(arrived_ptr + tile, 0)  # the next matmul expects zeros
            sums = _sum_of_parts(parts, SPLITS, PART)
            if GATED:
                up_sums = _sum_of_parts(parts + SPLITS * PART, SPLITS, PART)
    if last:
        mask = feature < out_features
        if HAS_BIAS:
            sums += gl.load(bias_ptr + feature, mask=mask, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if HAS_BIAS:
                up_sums += gl.load(bias_ptr + out_features + feature, mask=mask, other=0.0).to(gl.float32)[:, None]
            sums = gated(sums, up_sums, ACTIVATION, DTYPE)
        outs = out_ptr + column.to(gl.int64)[None, :] * out_features + feature[:, None]
        gl.store(outs, sums.to(DTYPE), mask=mask[:, None] & (column < num_rows)[None, :])


def _num_programs(rows: int, gated: bool) -> int:
    """About as many as an H200 has room for, by their registers."""
    return 260 if gated else 396 if rows == 32 else 660


def can_do(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether the kernel serves such a weight, and is the faster one. Gluon has no interpreter."""
    shape = weight.group == STEP // 2 and weight.scale_rows == 1 and weight.in_features % STEP == 0
    rows = x.dtype == torch.bfloat16 and x.shape[0] <= MAX_ROWS and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return weight.four_bits and shape and x.is_cuda and rows


def few_rows(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """As `kernel.few_rows`, for up to 32 rows of bf16. Timed as in `tiling`, for 1, 8, 16, and 32 rows: 7.2, 6.0, 23.2,
    11.9; 7.9, 6.4, 24.8, 12.9; 9.4, 7.7, 29.7, 17.0; 12.2, 10.9, 36.0, 23.5."""
    num_rows, in_features = x.shape
    out_features = weight.out_features if activation is None else weight.out_features // 2
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(out_features, OUT)
    rows = max(8, triton.next_power_of_2(num_rows))
    splits = max(1, min(_num_programs(rows, activation is not None) // tiles, in_features // STEP // 2))
    part, arrived = out, out
    if splits > 1:
        assert tiles <= MAX_TILES
        sums = 1 if activation is None else 2
        part = torch.empty((tiles, sums, splits, OUT, rows), dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _four_bits_kernel[(tiles, splits)](
        x, weight.values, weight.scale, out if weight.zero is None else weight.zero, out if bias is None else bias,
        out, part, arrived, num_rows, out_features, in_features // 8, x.stride(0), weight.scale.stride(0),
        weight.zero is not None, rows, splits, bias is not None, activation,
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out
