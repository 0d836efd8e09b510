"""Decode attention over a quantized cache: elements go from memory through registers into tensor cores.

Triton brings tiles of 8-bit values into the order that tensor cores want through shared memory, byte by byte, which
takes longer than to read 16-bit values. This kernel, in Gluon, loads 16 bytes per thread right into the registers in
which a product wants them. That works because the order of what a product sums over is free, as long as both operands
have the same one, and so is the order of its columns: where a thread needs elements that lie apart, it takes adjacent
ones, and the other operand, or the result, is reordered once per program.

A program is one warp, which handles one KV head and a share of one sequence's keys; see `decode.py`. A turn of its
loop takes 32 keys: two halves, each within one block.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOTHING = gl.constexpr(-1.0e30)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT.value, 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, _PRODUCT.value))
_KEYS = gl.constexpr(gl.SliceLayout(0, _PRODUCT.value))
_PLAIN = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))


def _layout(registers: list[list[int]], lanes: list[list[int]], words: int) -> gl.constexpr:
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [], [], [16, words]))


# Layouts for tiles of 16 tokens, in words of 4 elements. For keys, a thread has 4 adjacent words, or several such runs;
# 8 lanes have 8 keys. For values, a thread has adjacent words of 4 tokens, which are two pairs of adjacent tokens.
_KEY_64 = _layout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], 16)
_KEY_128 = _layout([[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], 32)
_VALUE_64 = _layout([[0, 1], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], 16)
_VALUE_128 = _layout([[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], 32)

# The scales of 16 tokens in words of 2, such that a thread gets those of the columns that it has of a product.
_SCALES = gl.constexpr(gl.DistributedLinearLayout([[4]], [[1], [2], [0], [0], [0]], [], [], [8]))

_TO_FP16 = gl.constexpr("""
{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}
""")


@gluon.jit
def _elements(words):
    """[..., words] int32 as four tensors of fp16, one for each byte."""
    return gl.inline_asm_elementwise(_TO_FP16, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1)


@gluon.jit
def _query_operand(query, HEAD_DIM: gl.constexpr):
    """[16, HEAD_DIM] with its columns in the order of `_key_operand`."""
    split = query.reshape([16, HEAD_DIM // 64, 4, 2, 2, 2, 2]).permute([0, 1, 3, 4, 5, 2, 6])
    return gl.convert_layout(split.reshape([16, HEAD_DIM]), _LEFT)


@gluon.jit
def _key_operand(words, HEAD_DIM: gl.constexpr):
    """[HEAD_DIM, 16], fp16. A thread's adjacent elements are in adjacent rows where it needs them."""
    a, b, c, d = _elements(words)
    split = gl.join(gl.join(a, b), gl.join(c, d)).reshape([16, HEAD_DIM // 64, 4, 2, 2, 2, 2])
    rows = split.permute([0, 1, 3, 4, 6, 2, 5]).reshape([16, HEAD_DIM])
    return gl.convert_layout(rows.permute([1, 0]), _RIGHT, assert_trivial=True)


@gluon.jit
def _value_operand(words, HEAD_DIM: gl.constexpr):
    """[16, HEAD_DIM], fp16. Column `8 * i + lane` is element i of the lane's adjacent ones."""
    a, b, c, d = _elements(words)
    split = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 1, 3, 2]).reshape([16, 8, HEAD_DIM // 8])
    columns = split.permute([0, 2, 1]).reshape([16, HEAD_DIM])
    return gl.convert_layout(columns, _RIGHT, assert_trivial=True)


@gluon.jit
def _normalised(query):
    """Rows divided by a power of two, so that they fit fp16 well, and these factors, fp32."""
    exponent = gl.max(gl.abs(query.to(gl.float32)), 1).to(gl.int32, bitcast=True) & 0x7F800000
    inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    return (query.to(gl.float32) * inverse[:, None]).to(gl.float16), exponent.to(gl.float32, bitcast=True)


@gluon.jit
def _block_of(table_ptr, first, end, BLOCK_SIZE: gl.constexpr):
    return gl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0).to(gl.int64)


@gluon.jit
def _load_keys(head_ptr, block, block_stride, first, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Keys [first, first + 16), in words. Read once, so they need not stay in a cache: without saying so, 2% slower."""
    LAYOUT: gl.constexpr = _KEY_128 if HEAD_DIM == 128 else _KEY_64
    WORDS: gl.constexpr = HEAD_DIM // 4
    start = (block * block_stride + (first % BLOCK_SIZE) * HEAD_DIM) // 4
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(head_ptr.to(gl.pointer_type(gl.int32)) + start + row * WORDS + word, eviction_policy="evict_first")


@gluon.jit
def _load_values(
    head_ptr,
    block,
    block_stride,
    first,
    visible_from,
    end,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """Values [first, first + 16), in words. Zeros before `visible_from`, where blocks may be another sequence's by now,
    and from `end` on: a NaN, which may be there, survives a weight of zero."""
    LAYOUT: gl.constexpr = _VALUE_128 if HEAD_DIM == 128 else _VALUE_64
    WORDS: gl.constexpr = HEAD_DIM // 4
    start = (block * block_stride + (first % BLOCK_SIZE) * HEAD_DIM) // 4
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    words = head_ptr.to(gl.pointer_type(gl.int32)) + start + row * WORDS + word
    there = first + row < end
    if HAS_WINDOW:
        there = there & (first + row >= visible_from)
    return gl.load(words, mask=there, other=0, eviction_policy="evict_first")


@gluon.jit
def _load_scales(head_ptr, block, block_stride, first, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The scales of tokens [first, first + 16), in words of 2."""
    start = block * block_stride + BLOCK_SIZE * HEAD_DIM + first % BLOCK_SIZE
    words = head_ptr.to(gl.pointer_type(gl.int16)) + start // 2
    return gl.load(words + gl.arange(0, 8, layout=_SCALES))


@gluon.jit
def _exponents(scales):
    """[16], int32, of scales in words of 2."""
    words = scales.to(gl.int32)
    exponents = gl.join(words & 0xFF, (words >> 8) & 0xFF).reshape([16])
    return gl.convert_layout(exponents, _KEYS, assert_trivial=True)


@gluon.jit
def _factor(exponent):
    """2 ** (exponent - 127), fp32; 0 for an exponent of 0 or less."""
    return (gl.maximum(exponent, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["window", "table_stride"])
def decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    row_ptr,
    context_ptr,
    shares_ptr,
    sink_ptr,
    score_scale,
    cap,
    window,
    query_token_stride,
    query_head_stride,
    block_stride,
    table_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PDL: gl.constexpr,
):
    head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    place = gl.program_id(1)
    if PDL:
        gdc_wait()
    seq = gl.load(shares_ptr + place * 4)
    if seq >= 0:
        start = gl.load(shares_ptr + place * 4 + 1)
        end = gl.load(shares_ptr + place * 4 + 2)
        num_shares = gl.load(shares_ptr + place * 4 + 3)
        visible_from = 0
        if HAS_WINDOW:
            visible_from = gl.maximum(gl.load(context_ptr + seq) - window, 0)
        table = table_ptr + gl.load(row_ptr + seq).to(gl.int64) * table_stride
        head_start = head * (BLOCK_SIZE * (HEAD_DIM + 1))
        keys = key_ptr + head_start
        values = value_ptr + head_start
        block = _block_of(table, start, end, BLOCK_SIZE)
        other_block = _block_of(table, start + 16, end, BLOCK_SIZE)
        key = _load_keys(keys, block, block_stride, start, HEAD_DIM, BLOCK_SIZE)
        other_key = _load_keys(keys, other_block, block_stride, start + 16, HEAD_DIM, BLOCK_SIZE)
        key_scale = _load_scales(keys, block, block_stride, start, HEAD_DIM, BLOCK_SIZE)
        other_key_scale = _load_scales(keys, other_block, block_stride, start + 16, HEAD_DIM, BLOCK_SIZE)
        value = _load_values(values, block, block_stride, start, visible_from, end, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW)
        other_value = _load_values(
            values, other_block, block_stride, start + 16, visible_from, end, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW
        )
        value_scale = _load_scales(values, block, block_stride, start, HEAD_DIM, BLOCK_SIZE)
        other_value_scale = _load_scales(values, other_block, block_stride, start + 16, HEAD_DIM, BLOCK_SIZE)
        block = _block_of(table, start + 32, end, BLOCK_SIZE)
        other_block = _block_of(table, start + 48, end, BLOCK_SIZE)

        row = gl.arange(0, 16, layout=gl.SliceLayout(1, _PLAIN))[:, None]
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, _PLAIN))[None, :]
        mask = (row < GROUP) & (dim < HEAD_DIM)
        query_offsets = seq.to(gl.int64) * query_token_stride + (head * GROUP + row) * query_head_stride + dim
        query = gl.load(query_ptr + query_offsets, mask=mask, other=0.0)
        query, query_factor = _normalised(query)
        query = _query_operand(query, HEAD_DIM)
        query_factor = gl.convert_layout(query_factor * score_scale, _ROWS)[:, None]

        out = gl.zeros([16, HEAD_DIM], gl.float32, _PRODUCT)
        total = gl.zeros([16], gl.float32, _ROWS)
        peak = gl.full([16], NOTHING, gl.float32, _ROWS)
        column = gl.arange(0, 16, layout=_KEYS)
        unit = 1
        for first in range(start, end, 32):
            scores = mma_v2(query, _key_operand(key, HEAD_DIM), gl.zeros([16, 16], gl.float32, _PRODUCT))
            others = mma_v2(query, _key_operand(other_key, HEAD_DIM), gl.zeros([16, 16], gl.float32, _PRODUCT))
            scores = scores * query_factor * _factor(_exponents(key_scale))[None, :]
            others = others * query_factor * _factor(_exponents(other_key_scale))[None, :]
            # The next turn's loads go into the registers that have just been read, and take as long as this turn.
            following = first + 32
            key = _load_keys(keys, block, block_stride, following, HEAD_DIM, BLOCK_SIZE)
            other_key = _load_keys(keys, other_block, block_stride, following + 16, HEAD_DIM, BLOCK_SIZE)
            key_scale = _load_scales(keys, block, block_stride, following, HEAD_DIM, BLOCK_SIZE)
            other_key_scale = _load_scales(keys, other_block, block_stride, following + 16, HEAD_DIM, BLOCK_SIZE)
            if HAS_CAP:
                scores = cap * (2.0 / (1.0 + gl.exp2(scores * -2.8853900817779268)) - 1.0)
                others = cap * (2.0 / (1.0 + gl.exp2(others * -2.8853900817779268)) - 1.0)
            in_share = first + column < end
            others_in_share = first + 16 + column < end
            if HAS_WINDOW:
                in_share = in_share & (first + column >= visible_from)
                others_in_share = others_in_share & (first + 16 + column >= visible_from)
            seen, others_seen = in_share[None, :], others_in_share[None, :]
            scores = gl.where(seen, scores, NOTHING)
            others = gl.where(others_seen, others, NOTHING)
            new_peak = gl.maximum(peak, gl.max(gl.maximum(scores, others), 1))
            weights = gl.where(seen, gl.exp2(scores - new_peak[:, None]), 0.0)
            other_weights = gl.where(others_seen, gl.exp2(others - new_peak[:, None]), 0.0)
            decay = gl.exp2(peak - new_peak)
            total = total * decay + gl.sum(weights + other_weights, 1)
            peak = new_peak
            exponent = gl.where(in_share, _exponents(value_scale), 0)
            other_exponent = gl.where(others_in_share, _exponents(other_value_scale), 0)
            new_unit = gl.maximum(unit, gl.max(gl.maximum(exponent, other_exponent), 0))
            decay = decay * _factor(127 + unit - new_unit)
            unit = new_unit
            weights = weights * _factor(127 + exponent - unit)[None, :]
            other_weights = other_weights * _factor(127 + other_exponent - unit)[None, :]
            left = gl.convert_layout(weights.to(gl.float16), _LEFT)
            out = mma_v2(left, _value_operand(value, HEAD_DIM), out * decay[:, None])
            left = gl.convert_layout(other_weights.to(gl.float16), _LEFT)
            out = mma_v2(left, _value_operand(other_value, HEAD_DIM), out)
            value = _load_values(
                values, block, block_stride, following, visible_from, end, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW
            )
            other_value = _load_values(
                values, other_block, block_stride, following + 16, visible_from, end, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW
            )
            value_scale = _load_scales(values, block, block_stride, following, HEAD_DIM, BLOCK_SIZE)
            other_value_scale = _load_scales(values, other_block, block_stride, following + 16, HEAD_DIM, BLOCK_SIZE)
            block = _block_of(table, following + 32, end, BLOCK_SIZE)
            other_block = _block_of(table, following + 48, end, BLOCK_SIZE)
        if PDL:
            gdc_launch_dependents()

        query_head = head * GROUP + gl.arange(0, 16, layout=_ROWS)
        real = gl.arange(0, 16, layout=_ROWS) < GROUP
        if HAS_SINKS and num_shares == 1:
            sink = gl.load(sink_ptr + query_head, mask=real, other=0.0).to(gl.float32) * 1.4426950408889634
            new_peak = gl.maximum(peak, sink)
            decay = gl.exp2(peak - new_peak)
            out = out * decay[:, None]
            total = total * decay + gl.exp2(sink - new_peak)
            peak = new_peak
        out = out * (_factor(unit) / gl.maximum(total, 1e-30))[:, None]
        out = out.reshape([16, HEAD_DIM // 8, 8]).permute([0, 2, 1]).reshape([16, HEAD_DIM])
        out = gl.convert_layout(out, _PLAIN)
        if num_shares == 1:
            out_row = (seq.to(gl.int64) * num_kv_heads + head) * GROUP + row
            gl.store(out_ptr + out_row * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = place * num_kv_heads * GROUP
            lse = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-30)), NOTHING)
            gl.store(part_lse_ptr + part + query_head, lse, mask=real)
            part_row = part + head * GROUP + row
            gl.store(part_ptr + part_row * HEAD_DIM + dim, out, mask=mask)
