"""The moves of `fp8_kv.moves` as Triton kernels: a program converts one head's piece of one row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.fp8_kv import DTYPE
from baton_kernels.fp8_kv.kernel import dequantized, factor_of, inverse_of, scale_for


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _move_kernel(
    pool_ptr,
    heads_ptr,
    ids_ptr,
    pool_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GATHERS: tl.constexpr,
):
    """The sizes of rows are not constexpr: they depend on how many layers a part has, and nothing may be compiled while
    serving."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.arange(0, SLOTS_PADDED)
    dim = tl.arange(0, DIM_PADDED)[None, :]
    inside = slot < BLOCK_SIZE
    mask = inside[:, None] & (dim < HEAD_DIM)
    within = slot[:, None] * HEAD_DIM + dim
    pool_row = tl.load(ids_ptr + row)
    pool_ptrs = pool_ptr + pool_row * pool_stride + head * (BLOCK_SIZE * HEAD_DIM) + within
    place = (row * num_heads + head) * (BLOCK_SIZE * (HEAD_DIM + 1))
    scale_ptrs = heads_ptr.to(tl.pointer_type(tl.uint8)) + place + BLOCK_SIZE * HEAD_DIM + slot
    if GATHERS:
        x = tl.load(pool_ptrs, mask=mask, other=0.0).to(tl.float32)
        scale = scale_for(tl.max(tl.abs(x), axis=1))
        stored = (x * inverse_of(scale)[:, None]).to(heads_ptr.dtype.element_ty)
        tl.store(heads_ptr + place + within, stored, mask=mask)
        tl.store(scale_ptrs, scale.to(tl.uint8), mask=inside)
    else:
        elements = tl.load(heads_ptr + place + within, mask=mask, other=0.0)
        factors = factor_of(tl.load(scale_ptrs, mask=inside, other=0))[:, None]
        tl.store(pool_ptrs, dequantized(elements, factors, pool_ptr.dtype.element_ty), mask=mask)


def move(gathers: bool, row_ids: Tensor, columns: Tensor, heads: Tensor, block_size: int, head_dim: int) -> None:
    """Move row `row_ids[i]` of `columns` to `heads[i]` if `gathers`, else back. columns: [pool rows, num_heads *
    block_size * head_dim]. heads: [num_rows, num_heads, head_bytes], uint8, contiguous."""
    num_rows, num_heads, _ = heads.shape
    _move_kernel[(num_rows, num_heads)](
        columns,
        heads.view(DTYPE),
        row_ids,
        columns.stride(0),
        num_heads,
        block_size,
        head_dim,
        triton.next_power_of_2(block_size),
        triton.next_power_of_2(head_dim),
        gathers,
        num_warps=2 if columns.dtype != torch.float32 else 4,
    )
