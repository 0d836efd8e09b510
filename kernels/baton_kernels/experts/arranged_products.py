"""Experts' MLPs with arranged MXFP4 weights: launches `arranged_kernel`, and gathers the rows that it reads."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton_kernels.experts.alignment_kernel import Blocks, align, blocks_by_token
from baton_kernels.experts.arranged import STEP
from baton_kernels.experts.arranged_kernel import arranged_kernel
from baton_kernels.experts.tiling import BY_TOKEN_TOKENS, ROW_TOKENS, arranged_rows
from baton_kernels.experts.weights import ExpertWeights
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.tile_programs import OUT, TileTiling
from baton_kernels.unfinished import ChosenParts

BAND = 8
"""How many blocks' tiles are computed side by side, if there are many: they share their reads in L2."""


@triton.jit(do_not_specialize=["num_choices"])
def _gather_kernel(
    x_ptr, order_ptr, count_ptr, out_ptr, num_choices, x_stride,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program copies one row of a block; rows of no choice are not written."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    choice = tl.load(order_ptr + row, mask=row // ROWS < tl.load(count_ptr), other=num_choices)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if choice < num_choices:
        token = (choice // TOP_K).to(tl.int64)
        values = tl.load(x_ptr + token * x_stride + column, mask=column < HIDDEN)
        tl.store(out_ptr + row.to(tl.int64) * HIDDEN + column, values, mask=column < HIDDEN)


def choose(rows: int) -> TileTiling:
    """Shared memory holds `stages` stages of 256 bytes per row of x and 4096 per group.

    A layer of gpt-oss-20b takes an H200 34 us for 1 token, 114 for 8, 160 for 32, 187 for 128, 240 for 256, 324 for
    512, and 910 for 2048. Reading the chosen experts once would take 11, 59, 87, 90, 90, 90, and 90.
    """
    if rows <= 32:
        return TileTiling(rows, 1, stages=3, programs=4, registers=64, least_steps=0)
    if rows == 64:
        return TileTiling(rows, 2, stages=3, programs=2, registers=80, least_steps=0)
    return TileTiling(rows, 2, stages=4, programs=1, registers=168, least_steps=0)


def parts_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, of: ExpertWeights, slot_mapping: Tensor | None
) -> ChosenParts:
    """The parts of each token's sum. x: bf16, contiguous rows; ids, weights: contiguous."""
    num_tokens, top_k = ids.shape
    rows = arranged_rows(num_tokens, top_k, of.global_num_experts)
    by_choice = num_tokens <= ROW_TOKENS
    if by_choice:
        blocks = Blocks(rows=rows, most=ids.numel(), ids=ids, slot_mapping=slot_mapping)
    elif num_tokens <= BY_TOKEN_TOKENS:
        blocks = blocks_by_token(ids, slot_mapping, of.num_experts, rows)
    else:
        blocks = align(ids, slot_mapping, of.num_experts, rows)
        x = _gathered(x, blocks, ids.numel(), top_k)
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = torch.clone(x, memory_format=torch.contiguous_format)
    inner = torch.empty((blocks.most * rows, of.intermediate_size), dtype=x.dtype, device=x.device)
    parts = torch.empty((ids.numel(), of.hidden_size), dtype=x.dtype, device=x.device)
    _launch(x, of.gate_up, of.gate_up_scale, of.gate_up_bias, weights, blocks, by_choice, inner, of, of.gate)
    _launch(inner, of.down, of.down_scale, of.down_bias, weights, blocks, by_choice, parts, of, None)
    return ChosenParts(parts, ids, slot_mapping, of.num_experts)


def _gathered(x: Tensor, blocks: Blocks, num_choices: int, top_k: int) -> Tensor:
    """The rows of the blocks, [blocks.num_rows, hidden_size]."""
    hidden = x.shape[1]
    order, _, count = blocks.arguments
    out = torch.empty((blocks.num_rows, hidden), dtype=x.dtype, device=x.device)
    _gather_kernel[(blocks.num_rows,)](
        x, order, count, out, num_choices, x.stride(0), hidden, top_k, blocks.rows,
        triton.next_power_of_2(hidden), num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


def _launch(
    x: Tensor,
    words: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    routed: Tensor,
    blocks: Blocks,
    by_choice: bool,
    out: Tensor,
    of: ExpertWeights,
    gate: str | None,
) -> None:
    num_experts, weight_rows, width = words.shape
    order, expert_of, count = blocks.arguments
    num_rows, columns = x.shape
    tiling = choose(blocks.rows)
    tiles = triton.cdiv(weight_rows, OUT * tiling.groups)
    x_desc = TensorDescriptor(
        x,
        [num_rows, columns],
        [x.stride(0) if num_rows > 1 else columns, 1],
        [tiling.rows, 64],
        gl.NVMMASharedLayout(128, 16, 2),
    )
    weight_desc = TensorDescriptor(
        words, [num_experts * weight_rows, width], [width, 1], [64, 16], gl.NVMMASharedLayout(64, 32, 2)
    )
    arranged_kernel[(blocks.most * tiles,)](
        x_desc, weight_desc, scales, out if bias is None else bias, routed, order,
        blocks.slot_mapping if blocks.has_padding else order, expert_of, count, out,
        routed.numel(), blocks.most, BAND if tiling.rows == 128 else blocks.most,
        num_experts, out.shape[1], width * 8 // STEP, routed.shape[1], tiling.groups, tiling.rows, tiling.stages,
        tiling.registers_of_second, by_choice, not by_choice and not blocks.is_sorted, blocks.has_padding,
        of.interleaved, bias is not None, gate, of.alpha, of.limit,
        num_warps=4, maxnreg=tiling.registers, **launch_options(x.device),
    )  # fmt: skip
