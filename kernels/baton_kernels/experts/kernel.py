"""The products of blocks of rows with their experts' weights, in Triton.

One launch serves all experts, like vLLM's `fused_moe_kernel`, but it computes `weight @ x.T`: the many rows of a weight
are the tensor cores' M dimension, so that few rows of x waste little. Tiles of the same features are computed side by
side, so that blocks of one expert read its weights from memory once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.experts.alignment_kernel import Blocks
from baton_kernels.experts.four_bits import load_weight
from baton_kernels.experts.tiling import Tiling
from baton_kernels.experts.weights import ExpertWeights, int_group
from baton_kernels.linear.kernel import gated
from baton_kernels.pdl import launch_options


@triton.jit
def apply_gate(gate, up, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """The gated activation in fp32; gate, up and the activation are rounded as separate operations would round them."""
    if GATE == "clamped":
        gate = tl.minimum(gate.to(DTYPE).to(tl.float32), LIMIT)
        up = tl.minimum(tl.maximum(up.to(DTYPE).to(tl.float32), -LIMIT), LIMIT)
        return (up + 1.0) * (gate * tl.sigmoid(gate * ALPHA))
    return gated(gate, up, GATE, DTYPE)


@triton.jit
def _place(most, num_tiles, group):
    """This program's block and tile: tile after tile for each band of `group` blocks."""
    program = tl.program_id(0)
    band = program // (group * num_tiles)
    height = tl.minimum(most - band * group, group)
    place = program - band * (group * num_tiles)
    return band * group + place % height, place // height


@triton.jit
def _choices_of(
    ids_ptr,
    slot_mapping_ptr,
    expert,
    num_tokens,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    """Each token's choice of the expert, and whether it has one: [ROWS]."""
    token = tl.arange(0, ROWS)
    slot = tl.arange(0, CHOICES)
    mask = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
    ids_ptrs = ids_ptr + token[:, None] * TOP_K + slot[None, :]
    hit = (tl.load(ids_ptrs, mask=mask, other=-1, cache_modifier=".cg") == expert) & mask
    if HAS_PADDING:
        slots = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=0, cache_modifier=".cg")
        hit = hit & (slots > 0)[:, None]
    return token * TOP_K + tl.max(tl.where(hit, slot[None, :], 0), 1), tl.max(hit.to(tl.int32), 1) > 0


@triton.jit
def _block(
    order_ptr,
    expert_of_ptr,
    count_ptr,
    block,
    num_choices,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    """A block's expert; and, [ROWS] each, its choices, which of them are real, and its rows in the tensor between the
    two products. A block that does not exist has no real choices.

    The second product reads all this before its wait, and so not from L1, which may have lines of earlier layers."""
    if BY_TOKEN:
        expert = block
        choice, taken = _choices_of(
            order_ptr, expert_of_ptr, expert, num_choices // TOP_K, TOP_K, CHOICES, ROWS, HAS_PADDING
        )
        place = choice
    else:
        # All three at once: entries of blocks that do not exist are read, but not used.
        there = block < tl.load(count_ptr, cache_modifier=".cg")
        expert = tl.where(there, tl.load(expert_of_ptr + block, cache_modifier=".cg"), 0)
        place = block * ROWS + tl.arange(0, ROWS)
        choice = tl.load(order_ptr + place, cache_modifier=".cg")
        taken = there & (choice < num_choices)
    return expert.to(tl.int64), choice, taken, place


@triton.jit
def _product(sums, weight, x):
    """sums + weight @ x; 8-bit weights are multiplied in x's dtype."""
    return tl.dot(weight.to(x.dtype), x, sums, input_precision="ieee")


@triton.jit
def _product_of_blocks(sums, weight, x, scale_ptr, rows, begin, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """sums + weight @ x, where all of the weight's columns, which begin at `begin`, belong to one block."""
    scale = tl.load(scale_ptr + rows // BLOCK * (COLUMNS // BLOCK) + begin // BLOCK)
    return sums + _product(tl.zeros_like(sums), weight, x) * scale[:, None]


@triton.jit
def _row_values(ptr, offsets, mask):
    """Load one value for each row of a weight, as a column."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_choices", "most", "group"])
def _gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    order_ptr,
    expert_of_ptr,
    count_ptr,
    out_ptr,
    num_choices,
    most,
    group,
    x_stride,
    expert_stride,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    X_SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDTH: intermediate_size. out: [most * ROWS, WIDTH], in the order of the blocks; or of the choices, if nothing is
    sorted.

    FOUR_BITS: weights are MXFP4, or with INTEGERS 4-bit integers, of which so many columns share a scale.
    SCALED: weights have a scale per row. BLOCK: weights have a scale per so many rows and columns, which divide all
    sizes.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = HIDDEN % DEPTH == 0
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    APART: tl.constexpr = 1 if INTERLEAVED else WIDTH  # rows from a gate to its up
    block, tile = _place(most, tl.cdiv(WIDTH, OUT), group)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    expert, choice, taken, place = _block(
        order_ptr, expert_of_ptr, count_ptr, block, num_choices, TOP_K, CHOICES, ROWS, BY_TOKEN, HAS_PADDING
    )
    if tl.max(taken.to(tl.int32), 0) > 0:
        token = tl.where(taken, choice // TOP_K, 0).to(tl.int64)
        feature = tile * OUT + tl.arange(0, OUT)
        mask = feature < WIDTH
        row = tl.minimum(feature, WIDTH - 1) * STEP  # repeat the last row instead of masking
        rows = expert * (2 * WIDTH) + row
        column = tl.arange(0, DEPTH)
        weight_ptrs = weight_ptr + expert * expert_stride + (row[:, None] * HIDDEN + column[None, :])
        x_ptrs = x_ptr + token[None, :] * x_stride + column[:, None]
        gate = tl.zeros([OUT, ROWS], tl.float32)
        up = tl.zeros([OUT, ROWS], tl.float32)
        for k in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
            if FOUR_BITS:
                x = tl.load(x_ptrs, mask=taken[None, :] & (column < HIDDEN - k)[:, None], other=0.0)
                gate = _product(gate, load_weight(weight_ptr, scale_ptr, rows, k, HIDDEN, DEPTH, INTEGERS, DTYPE), x)
                weight = load_weight(weight_ptr, scale_ptr, rows + APART, k, HIDDEN, DEPTH, INTEGERS, DTYPE)
                up = _product(up, weight, x)
            elif BLOCK:
                x = tl.load(x_ptrs, mask=taken[None, :], other=0.0)
                gate = _product_of_blocks(gate, tl.load(weight_ptrs), x, scale_ptr, rows, k, HIDDEN, BLOCK)
                weight = tl.load(weight_ptrs + APART * HIDDEN)
                up = _product_of_blocks(up, weight, x, scale_ptr, rows + APART, k, HIDDEN, BLOCK)
            elif EVEN:
                x = tl.load(x_ptrs, mask=taken[None, :], other=0.0)
                gate = _product(gate, tl.load(weight_ptrs), x)
                up = _product(up, tl.load(weight_ptrs + APART * HIDDEN), x)
            else:
                inside = column < HIDDEN - k
                x = tl.load(x_ptrs, mask=taken[None, :] & inside[:, None], other=0.0)
                gate = _product(gate, tl.load(weight_ptrs, mask=inside[None, :], other=0.0), x)
                up = _product(up, tl.load(weight_ptrs + APART * HIDDEN, mask=inside[None, :], other=0.0), x)
            weight_ptrs += DEPTH
            x_ptrs += DEPTH
        if PDL and not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if X_SCALED:
            x_scale = tl.load(x_scale_ptr + token)[None, :]
            gate *= x_scale
            up *= x_scale
        if SCALED:
            gate *= _row_values(scale_ptr, rows, mask)
            up *= _row_values(scale_ptr, rows + APART, mask)
        if HAS_BIAS:
            gate += _row_values(bias_ptr, rows, mask)
            up += _row_values(bias_ptr, rows + APART, mask)
        result = apply_gate(gate, up, GATE, ALPHA, LIMIT, DTYPE).to(DTYPE)
        out_ptrs = out_ptr + place.to(tl.int64)[None, :] * WIDTH + feature[:, None]
        tl.store(out_ptrs, result, mask=mask[:, None] & taken[None, :])


@triton.jit(do_not_specialize=["num_choices", "most", "group"])
def _down_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    routed_ptr,
    order_ptr,
    expert_of_ptr,
    count_ptr,
    out_ptr,
    num_choices,
    most,
    group,
    expert_stride,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    X_SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: the output of `_gate_up_kernel`. routed: [num_choices], the router's weights. out: [num_choices, HIDDEN]. All
    else as in `_gate_up_kernel`."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = WIDTH % DEPTH == 0
    block, tile = _place(most, tl.cdiv(HIDDEN, OUT), group)
    # This needs no wait: what it reads was complete before any program of the first product let this kernel begin.
    expert, choice, taken, place = _block(
        order_ptr, expert_of_ptr, count_ptr, block, num_choices, TOP_K, CHOICES, ROWS, BY_TOKEN, HAS_PADDING
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tl.max(taken.to(tl.int32), 0) > 0:
        feature = tile * OUT + tl.arange(0, OUT)
        mask = feature < HIDDEN
        row = tl.minimum(feature, HIDDEN - 1)
        rows = expert * HIDDEN + row
        column = tl.arange(0, DEPTH)
        weight_ptrs = weight_ptr + expert * expert_stride + (row[:, None] * WIDTH + column[None, :])
        x_ptrs = x_ptr + place.to(tl.int64)[None, :] * WIDTH + column[:, None]
        sums = tl.zeros([OUT, ROWS], tl.float32)
        for k in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
            if FOUR_BITS:
                x = tl.load(x_ptrs, mask=taken[None, :] & (column < WIDTH - k)[:, None], other=0.0)
                sums = _product(sums, load_weight(weight_ptr, scale_ptr, rows, k, WIDTH, DEPTH, INTEGERS, DTYPE), x)
            elif BLOCK:
                x = tl.load(x_ptrs, mask=taken[None, :], other=0.0)
                sums = _product_of_blocks(sums, tl.load(weight_ptrs), x, scale_ptr, rows, k, WIDTH, BLOCK)
            elif EVEN:
                x = tl.load(x_ptrs, mask=taken[None, :], other=0.0)
                sums = _product(sums, tl.load(weight_ptrs), x)
            else:
                inside = column < WIDTH - k
                x = tl.load(x_ptrs, mask=taken[None, :] & inside[:, None], other=0.0)
                sums = _product(sums, tl.load(weight_ptrs, mask=inside[None, :], other=0.0), x)
            weight_ptrs += DEPTH
            x_ptrs += DEPTH
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if X_SCALED:
            sums *= tl.load(x_scale_ptr + place, mask=taken, other=0.0)[None, :]
        if SCALED:
            sums *= _row_values(scale_ptr, rows, mask)
        if HAS_BIAS:
            sums += _row_values(bias_ptr, rows, mask)
        sums *= tl.load(routed_ptr + choice, mask=taken, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + choice.to(tl.int64)[None, :] * HIDDEN + feature[:, None]
        tl.store(out_ptrs, sums.to(DTYPE), mask=mask[:, None] & taken[None, :])


def gate_up(
    x: Tensor, x_scale: Tensor | None, of: ExpertWeights, blocks: Blocks, num_choices: int, top_k: int, tiling: Tiling,
    dtype: torch.dtype, early: bool = False,
) -> Tensor:  # fmt: skip
    """The gated product: [blocks.num_rows, intermediate_size] of `dtype`, in the order of the blocks; rows of no choice
    are not written.

    x: [num_tokens, hidden_size], contiguous rows. x_scale: [num_tokens, 1] if x is quantized; else None. early: the
    next kernel's programs begin as soon as there is room for them, rather than after the products.
    """
    width = of.intermediate_size
    out = torch.empty((blocks.num_rows, width), dtype=dtype, device=x.device)
    scale, bias = of.gate_up_scale, of.gate_up_bias
    grid = (blocks.most * triton.cdiv(width, tiling.out),)
    _gate_up_kernel[grid](
        x, out if x_scale is None else x_scale, of.gate_up, out if scale is None else scale,
        out if bias is None else bias, *blocks.arguments, out,
        num_choices, blocks.most, tiling.group or blocks.most, x.stride(0), of.gate_up.stride(0),
        width, of.hidden_size, top_k, triton.next_power_of_2(top_k),
        tiling.rows, tiling.out, tiling.depth, tiling.num_stages, not blocks.is_sorted, blocks.has_padding,
        of.interleaved, of.four_bits, int_group(of.gate_up, scale), of.block, of.scales_rows, x_scale is not None,
        bias is not None, of.gate, of.alpha, of.limit, early,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out


def down(
    x: Tensor, x_scale: Tensor | None, of: ExpertWeights, blocks: Blocks, weights: Tensor, tiling: Tiling,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[num_choices, hidden_size] of `dtype`: each choice's product, multiplied by its weight; choices of no expert are
    not written. x: as `gate_up` returns it, contiguous. x_scale: [rows, 1] if x is quantized; else None. weights:
    [num_tokens, top_k], contiguous."""
    out = torch.empty((weights.numel(), of.hidden_size), dtype=dtype, device=x.device)
    scale, bias = of.down_scale, of.down_bias
    grid = (blocks.most * triton.cdiv(of.hidden_size, tiling.out),)
    _down_kernel[grid](
        x, out if x_scale is None else x_scale, of.down, out if scale is None else scale,
        out if bias is None else bias, weights, *blocks.arguments, out,
        weights.numel(), blocks.most, tiling.group or blocks.most, of.down.stride(0),
        of.intermediate_size, of.hidden_size, weights.shape[1], triton.next_power_of_2(weights.shape[1]),
        tiling.rows, tiling.out, tiling.depth, tiling.num_stages, not blocks.is_sorted, blocks.has_padding,
        of.four_bits, int_group(of.down, scale), of.block, of.scales_rows, x_scale is not None, bias is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out
