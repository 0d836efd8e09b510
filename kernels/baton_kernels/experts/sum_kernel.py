"""The sum over the results of a token's experts, in Triton."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.pdl import launch_options


@triton.jit
def _sum_kernel(
    parts_ptr,
    ids_ptr,
    slot_mapping_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums a token's choices in order, without choices of no expert, whose parts were not written."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.arange(0, CHOICES)
    choice = token * TOP_K + slot
    if PDL:
        tl.extra.cuda.gdc_wait()
    taken = tl.load(ids_ptr + choice, mask=slot < TOP_K, other=NUM_EXPERTS) < NUM_EXPERTS
    if HAS_PADDING:
        taken = taken & (tl.load(slot_mapping_ptr + token) > 0)
    mask = taken[:, None] & (column < HIDDEN)[None, :]
    parts = tl.load(parts_ptr + choice[:, None] * HIDDEN + column[None, :], mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out = tl.sum(parts.to(tl.float32), 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + column, out, mask=column < HIDDEN)


def summed(parts: Tensor, ids: Tensor, slot_mapping: Tensor | None, num_experts: int) -> Tensor:
    """The sums, [num_tokens, hidden_size], of the parts, [num_tokens * top_k, hidden_size]."""
    num_tokens, top_k = ids.shape
    hidden = parts.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=parts.dtype, device=parts.device)
    tile = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, tile))](
        parts, ids, ids if slot_mapping is None else slot_mapping, out,
        hidden, top_k, triton.next_power_of_2(top_k), num_experts, tile, slot_mapping is not None,
        num_warps=4, **launch_options(parts.device),
    )  # fmt: skip
    return out
