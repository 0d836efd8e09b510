"""Decode attention over a quantized cache: elements go from memory through registers into tensor cores.

Triton brings tiles of 8-bit values into the order that tensor cores want through shared memory, byte by byte, which
takes longer than to read 16-bit values. This kernel, in Gluon, loads 16 bytes per thread right into the registers in
which a product wants them. That works because the order of what a product sums over is free, as long as both operands
have the same one, and so is the order of its columns: where a thread needs elements that lie apart, it takes adjacent
ones, and the other operand, or the result, is reordered once per program.

A program is one warp, which handles one KV head and a share of one sequence's keys; see `decode.py`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE_KEYS = 16
NOTHING = gl.constexpr(-1.0e30)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT.value, 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, _PRODUCT.value))
_KEYS = gl.constexpr(gl.SliceLayout(0, _PRODUCT.value))
_PLAIN = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))


def _layout(registers: list[list[int]], lanes: list[list[int]], words: int) -> gl.constexpr:
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [], [], [TILE_KEYS, words]))


# Of tiles of 16 tokens, in words of 4 elements. Of keys, a thread has 4 adjacent words, or several such runs; 8 lanes
# have 8 keys. Of values, a thread has adjacent words of 4 tokens, two and two of which are adjacent.
_KEY_64 = _layout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], 16)
_KEY_128 = _layout([[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], 32)
_VALUE_64 = _layout([[0, 1], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], 16)
_VALUE_128 = _layout([[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], 32)

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
    """[16, HEAD_DIM], bf16. Column `8 * i + lane` is element i of the lane's adjacent ones."""
    a, b, c, d = _elements(words)
    split = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 1, 3, 2]).reshape([16, 8, HEAD_DIM // 8])
    columns = split.permute([0, 2, 1]).reshape([16, HEAD_DIM]).to(gl.float32)
    return gl.convert_layout(columns, _RIGHT, assert_trivial=True).to(gl.bfloat16)


@gluon.jit
def _normalised(query):
    """Rows divided by a power of two, so that they fit fp16 well, and these factors, fp32."""
    exponent = gl.max(gl.abs(query.to(gl.float32)), 1).to(gl.int32, bitcast=True) & 0x7F800000
    inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    return (query.to(gl.float32) * inverse[:, None]).to(gl.float16), exponent.to(gl.float32, bitcast=True)


@gluon.jit
def _factor(scale):
    return (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _block_of(table_ptr, first, end, BLOCK_SIZE: gl.constexpr):
    return gl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0).to(gl.int64)


@gluon.jit
def _load_tile(key_ptr, value_ptr, block, block_stride, first, end, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Keys and values [first, first + 16), which lie in one block, in words, and their scales; zeros from `end` on."""
    KEY: gl.constexpr = _KEY_128 if HEAD_DIM == 128 else _KEY_64
    VALUE: gl.constexpr = _VALUE_128 if HEAD_DIM == 128 else _VALUE_64
    WORDS: gl.constexpr = HEAD_DIM // 4
    start = (block * block_stride + (first % BLOCK_SIZE) * HEAD_DIM) // 4
    key_row = gl.arange(0, 16, layout=gl.SliceLayout(1, KEY))[:, None]
    key_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, KEY))[None, :]
    key_words = key_ptr.to(gl.pointer_type(gl.int32)) + start
    key = gl.load(key_words + key_row * WORDS + key_word, mask=key_row + first < end, other=0)
    value_row = gl.arange(0, 16, layout=gl.SliceLayout(1, VALUE))[:, None]
    value_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, VALUE))[None, :]
    value_words = value_ptr.to(gl.pointer_type(gl.int32)) + start
    value = gl.load(value_words + value_row * WORDS + value_word, mask=value_row + first < end, other=0)
    column = gl.arange(0, 16, layout=_KEYS)
    scales = block * block_stride + BLOCK_SIZE * HEAD_DIM + first % BLOCK_SIZE + column
    there = column + first < end
    key_scale = gl.load(key_ptr.to(gl.pointer_type(gl.uint8)) + scales, mask=there, other=0)
    value_scale = gl.load(value_ptr.to(gl.pointer_type(gl.uint8)) + scales, mask=there, other=0)
    return key, value, key_scale, value_scale


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
        table = table_ptr + gl.load(row_ptr + seq).to(gl.int64) * table_stride
        head_start = head * (BLOCK_SIZE * (HEAD_DIM + 1))
        keys = key_ptr + head_start
        values = value_ptr + head_start
        block = _block_of(table, start, end, BLOCK_SIZE)
        key, value, key_scale, value_scale = _load_tile(
            keys, values, block, block_stride, start, end, HEAD_DIM, BLOCK_SIZE
        )
        block = _block_of(table, start + 16, end, BLOCK_SIZE)

        visible_from = 0
        if HAS_WINDOW:
            visible_from = gl.maximum(gl.load(context_ptr + seq) - window, 0)
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
        column = gl.arange(0, 16, layout=_KEYS)[None, :]
        for first in range(start, end, 16):
            next_key, next_value, next_key_scale, next_value_scale = _load_tile(
                keys, values, block, block_stride, first + 16, end, HEAD_DIM, BLOCK_SIZE
            )
            block = _block_of(table, first + 32, end, BLOCK_SIZE)
            scores = mma_v2(query, _key_operand(key, HEAD_DIM), gl.zeros([16, 16], gl.float32, _PRODUCT))
            scores = scores * query_factor * _factor(key_scale)[None, :]
            if HAS_CAP:
                scores = cap * (2.0 / (1.0 + gl.exp2(scores * -2.8853900817779268)) - 1.0)
            seen = first + column < end
            if HAS_WINDOW:
                seen = seen & (first + column >= visible_from)
            scores = gl.where(seen, scores, NOTHING)
            new_peak = gl.maximum(peak, gl.max(scores, 1))
            weights = gl.where(seen, gl.exp2(scores - new_peak[:, None]), 0.0)
            decay = gl.exp2(peak - new_peak)
            total = total * decay + gl.sum(weights, 1)
            peak = new_peak
            # A weight times a factor, which is a power of two, may be too small for fp16, but is as exact in bf16.
            weights = weights * _factor(value_scale)[None, :]
            left = gl.convert_layout(weights.to(gl.bfloat16), _LEFT)
            out = mma_v2(left, _value_operand(value, HEAD_DIM), out * decay[:, None])

            key, value, key_scale, value_scale = next_key, next_value, next_key_scale, next_value_scale
        if PDL:
            gdc_launch_dependents()

        query_head = head * GROUP + gl.arange(0, 16, layout=_ROWS)
        real = gl.arange(0, 16, layout=_ROWS) < GROUP
        if HAS_SINKS:
            if num_shares == 1:
                sink = gl.load(sink_ptr + query_head, mask=real, other=0.0).to(gl.float32) * 1.4426950408889634
                new_peak = gl.maximum(peak, sink)
                decay = gl.exp2(peak - new_peak)
                out = out * decay[:, None]
                total = total * decay + gl.exp2(sink - new_peak)
                peak = new_peak
        out = out / gl.maximum(total, 1e-30)[:, None]
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
