"""Experts for one or two tokens, in Triton: each choice is a matrix-vector product, and the second kernel also sums a
token's choices. Nothing is sorted; when two tokens share an expert, one mostly reads it from L2.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.experts.four_bits import load_groups
from baton_kernels.experts.kernel import apply_gate
from baton_kernels.experts.tiling import RowTilings
from baton_kernels.experts.weights import ExpertWeights, int_group
from baton_kernels.pdl import launch_options


@triton.jit
def _gate_up_rows_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    slot_mapping_ptr,
    out_ptr,
    x_stride,
    expert_stride,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [num_choices, WIDTH]."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = HIDDEN % DEPTH == 0
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    APART: tl.constexpr = 1 if INTERLEAVED else WIDTH
    choice = tl.program_id(1)
    token = (choice // TOP_K).to(tl.int64)
    feature = tl.program_id(0) * OUT + tl.arange(0, OUT)
    mask = feature < WIDTH
    row = tl.minimum(feature, WIDTH - 1) * STEP
    column = tl.arange(0, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids_ptr + choice).to(tl.int64)
    if HAS_PADDING:
        expert = tl.where(tl.load(slot_mapping_ptr + token) <= 0, NUM_EXPERTS, expert)
    if expert < NUM_EXPERTS:
        weight_ptrs = weight_ptr + expert * expert_stride + (row[:, None] * HIDDEN + column[None, :])
        x_ptrs = x_ptr + token * x_stride + column
        rows = expert * (2 * WIDTH) + row
        if FOUR_BITS:
            within = tl.arange(0, DEPTH // 32)
            group = rows[:, None] * (HIDDEN // 32) + within[None, :]
            gates = tl.zeros([OUT, DEPTH // 32, 16], tl.float32)
            ups = tl.zeros([OUT, DEPTH // 32, 16], tl.float32)
        else:
            gates = tl.zeros([OUT, DEPTH], tl.float32)
            ups = tl.zeros([OUT, DEPTH], tl.float32)
        for k in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
            if FOUR_BITS:
                x = tl.load(x_ptrs, mask=column < HIDDEN - k, other=0.0).to(tl.float32)
                x_even, x_odd = tl.split(x.reshape(1, DEPTH // 32, 16, 2))
                there = (within < HIDDEN // 32 - k // 32)[None, :]
                even, odd, power = load_groups(weight_ptr, scale_ptr, group, there, INTEGERS)
                gates += (even * x_even + odd * x_odd) * power
                even, odd, power = load_groups(weight_ptr, scale_ptr, group + APART * (HIDDEN // 32), there, INTEGERS)
                ups += (even * x_even + odd * x_odd) * power
                group += DEPTH // 32
            elif BLOCK:
                x = tl.load(x_ptrs).to(tl.float32)[None, :]
                scales = scale_ptr + rows // BLOCK * (HIDDEN // BLOCK) + k // BLOCK
                gates += tl.load(weight_ptrs).to(tl.float32) * x * tl.load(scales)[:, None]
                scales = scale_ptr + (rows + APART) // BLOCK * (HIDDEN // BLOCK) + k // BLOCK
                ups += tl.load(weight_ptrs + APART * HIDDEN).to(tl.float32) * x * tl.load(scales)[:, None]
            elif EVEN:
                x = tl.load(x_ptrs).to(tl.float32)[None, :]
                gates += tl.load(weight_ptrs).to(tl.float32) * x
                ups += tl.load(weight_ptrs + APART * HIDDEN).to(tl.float32) * x
            else:
                inside = column < HIDDEN - k
                x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
                gates += tl.load(weight_ptrs, mask=inside[None, :], other=0.0).to(tl.float32) * x
                ups += tl.load(weight_ptrs + APART * HIDDEN, mask=inside[None, :], other=0.0).to(tl.float32) * x
            weight_ptrs += DEPTH
            x_ptrs += DEPTH
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        gate = tl.sum(tl.sum(gates, 2), 1) if FOUR_BITS else tl.sum(gates, 1)
        up = tl.sum(tl.sum(ups, 2), 1) if FOUR_BITS else tl.sum(ups, 1)
        if SCALED:
            gate *= tl.load(scale_ptr + rows)
            up *= tl.load(scale_ptr + rows + APART)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + rows).to(tl.float32)
            up += tl.load(bias_ptr + rows + APART).to(tl.float32)
        result = apply_gate(gate, up, GATE, ALPHA, LIMIT, DTYPE)
        tl.store(out_ptr + choice.to(tl.int64) * WIDTH + feature, result.to(DTYPE), mask=mask)


@triton.jit
def _down_rows_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    routed_ptr,
    ids_ptr,
    slot_mapping_ptr,
    out_ptr,
    expert_stride,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes `OUT` features of all experts of one token. out: [num_tokens, HIDDEN]."""
    EVEN: tl.constexpr = WIDTH % DEPTH == 0
    token = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * OUT + tl.arange(0, OUT)
    mask = feature < HIDDEN
    row = tl.minimum(feature, HIDDEN - 1)
    column = tl.arange(0, DEPTH)
    slot = tl.arange(0, CHOICES)
    choice = token * TOP_K + slot
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids_ptr + choice, mask=slot < TOP_K, other=NUM_EXPERTS).to(tl.int64)
    if HAS_PADDING:
        expert = tl.where(tl.load(slot_mapping_ptr + token) <= 0, NUM_EXPERTS, expert)
    taken = expert < NUM_EXPERTS
    routed = tl.load(routed_ptr + choice, mask=taken, other=0.0).to(tl.float32)
    rows = tl.where(taken, expert, 0)[:, None] * HIDDEN + row[None, :]
    inner = row[None, :, None] * WIDTH + column[None, None, :]
    weight_ptrs = weight_ptr + tl.where(taken, expert, 0)[:, None, None] * expert_stride + inner
    x_ptrs = x_ptr + choice[:, None, None] * WIDTH + column[None, None, :]
    used = taken[:, None, None]
    if FOUR_BITS:
        within = tl.arange(0, DEPTH // 32)
        group = rows[:, :, None] * (WIDTH // 32) + within[None, None, :]
        sums = tl.zeros([CHOICES, OUT, DEPTH // 32, 16], tl.float32)
    else:
        sums = tl.zeros([CHOICES, OUT, DEPTH], tl.float32)
    for k in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        valid = used if EVEN else used & (column < WIDTH - k)[None, None, :]
        x = tl.load(x_ptrs, mask=valid, other=0.0).to(tl.float32)
        if FOUR_BITS:
            x_even, x_odd = tl.split(x.reshape(CHOICES, 1, DEPTH // 32, 16, 2))
            there = used & (within < WIDTH // 32 - k // 32)[None, None, :]
            even, odd, power = load_groups(weight_ptr, scale_ptr, group, there, INTEGERS)
            sums += (even * x_even + odd * x_odd) * power
            group += DEPTH // 32
        elif BLOCK:
            scale = tl.load(scale_ptr + rows // BLOCK * (WIDTH // BLOCK) + k // BLOCK, mask=taken[:, None], other=0.0)
            sums += tl.load(weight_ptrs, mask=valid, other=0.0).to(tl.float32) * x * scale[:, :, None]
        else:
            sums += tl.load(weight_ptrs, mask=valid, other=0.0).to(tl.float32) * x
        weight_ptrs += DEPTH
        x_ptrs += DEPTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    parts = tl.sum(tl.sum(sums, 3), 2) if FOUR_BITS else tl.sum(sums, 2)
    if SCALED:
        parts *= tl.load(scale_ptr + rows, mask=taken[:, None], other=0.0)
    if HAS_BIAS:
        parts += tl.load(bias_ptr + rows, mask=taken[:, None], other=0.0).to(tl.float32)
    out = tl.sum(parts * routed[:, None], 0)
    tl.store(out_ptr + token * HIDDEN + feature, out.to(out_ptr.dtype.element_ty), mask=mask)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, of: ExpertWeights, slot_mapping: Tensor | None, tilings: RowTilings
) -> Tensor:
    """Returns [num_tokens, hidden_size]. x: contiguous rows; ids, weights: contiguous."""
    num_tokens, top_k = ids.shape
    width, hidden, num_experts = of.intermediate_size, of.hidden_size, of.num_experts
    inner = torch.empty((num_tokens * top_k, width), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    slot_mapping_ptr = ids if slot_mapping is None else slot_mapping
    options = launch_options(x.device)
    first, second = tilings.gate_up, tilings.down
    _gate_up_rows_kernel[(triton.cdiv(width, first.out), num_tokens * top_k)](
        x, of.gate_up, out if of.gate_up_scale is None else of.gate_up_scale,
        out if of.gate_up_bias is None else of.gate_up_bias, ids, slot_mapping_ptr, inner,
        x.stride(0), of.gate_up.stride(0), width, hidden, top_k, num_experts,
        first.out, first.depth, first.num_stages, of.interleaved, of.four_bits,
        int_group(of.gate_up, of.gate_up_scale), of.block, of.scales_rows, of.gate_up_bias is not None,
        slot_mapping is not None, of.gate, of.alpha, of.limit,
        num_warps=first.num_warps, **options,
    )  # fmt: skip
    _down_rows_kernel[(triton.cdiv(hidden, second.out), num_tokens)](
        inner, of.down, out if of.down_scale is None else of.down_scale,
        out if of.down_bias is None else of.down_bias, weights, ids, slot_mapping_ptr, out,
        of.down.stride(0), width, hidden, top_k, triton.next_power_of_2(top_k), num_experts,
        second.out, second.depth, second.num_stages, of.four_bits, int_group(of.down, of.down_scale), of.block,
        of.scales_rows, of.down_bias is not None, slot_mapping is not None, num_warps=second.num_warps, **options,
    )  # fmt: skip
    return out
