"""The sum over the results of a token's experts, in Triton."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.pdl import launch_options
from baton_kernels.unfinished import ChosenParts


@triton.jit
def sum_of_parts(
    parts_ptr,
    ids_ptr,
    slot_mapping_ptr,
    token,
    column,
    real,
    mask,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    EAGER: tl.constexpr,
):
    """The sums of the tokens' parts, fp32, added in order, without those of no expert or of padding, which were not
    written. token: int64, [rows, 1]. column: [1, columns]. real: which tokens there are, [rows, 1]. mask: which sums
    are wanted, [rows, columns]. EAGER: read all parts, without waiting for what says which of them were written."""
    if HAS_PADDING:
        real = real & (tl.load(slot_mapping_ptr + token, mask=real, other=0) > 0)
    total = tl.zeros(mask.shape, tl.float32)
    for slot in tl.static_range(TOP_K):
        choice = token * TOP_K + slot
        taken = tl.load(ids_ptr + choice, mask=real, other=NUM_EXPERTS) < NUM_EXPERTS
        part = tl.load(parts_ptr + choice * N + column, mask=mask if EAGER else mask & taken, other=0.0)
        part = part.to(tl.float32)
        total += tl.where(taken, part, 0.0) if EAGER else part
    return total


@triton.jit
def _sum_kernel(
    parts_ptr,
    ids_ptr,
    slot_mapping_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    real, mask = token >= 0, column < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_wait()
    out = sum_of_parts(
        parts_ptr, ids_ptr, slot_mapping_ptr, token, column, real, mask, HIDDEN, TOP_K, NUM_EXPERTS, HAS_PADDING, False
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + token * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def summed(chosen: ChosenParts) -> Tensor:
    """The sums, [num_tokens, hidden_size]."""
    parts, ids, slot_mapping, num_experts = chosen
    num_tokens, top_k = ids.shape
    hidden = parts.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=parts.dtype, device=parts.device)
    tile = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, tile))](
        parts, ids, ids if slot_mapping is None else slot_mapping, out,
        hidden, top_k, num_experts, tile, slot_mapping is not None,
        num_warps=4, **launch_options(parts.device),
    )  # fmt: skip
    return out
