"""Copies a range of a sequence's keys and values from its blocks into contiguous memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.fp8_kv.kernel import dequantized, head_stride, load_factors
from baton_kernels.paged_attention.batch import PagedBatch

TILE_TOKENS = 32


@triton.jit(do_not_specialize=["seq", "start", "num_tokens", "num_rows", "table_stride"])
def _gather_kernel(
    key_ptr,
    value_ptr,
    out_key_ptr,
    out_value_ptr,
    table_ptr,
    row_ptr,
    seq,
    start,
    num_tokens,
    num_rows,
    block_stride,
    table_stride,
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    there = row < num_tokens
    mask = there[:, None] & (dim < HEAD_DIM)
    position = start + row
    table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    offset = position % BLOCK_SIZE
    place = block * block_stride + head * head_stride(key_ptr, BLOCK_SIZE, HEAD_DIM)
    offsets = (place + offset * HEAD_DIM)[:, None] + dim
    out_offsets = (row.to(tl.int64) * out_stride + head * HEAD_DIM)[:, None] + dim
    out_mask = (row < num_rows)[:, None] & (dim < HEAD_DIM)
    key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
    value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
    if key_ptr.dtype.element_ty == tl.float8e4nv:
        key_factors = load_factors(key_ptr, place, offset, there, BLOCK_SIZE, HEAD_DIM)
        value_factors = load_factors(value_ptr, place, offset, there, BLOCK_SIZE, HEAD_DIM)
        key = dequantized(key, key_factors[:, None], out_key_ptr.dtype.element_ty)
        value = dequantized(value, value_factors[:, None], out_value_ptr.dtype.element_ty)
    tl.store(out_key_ptr + out_offsets, key.to(out_key_ptr.dtype.element_ty), mask=out_mask)
    tl.store(out_value_ptr + out_offsets, value.to(out_value_ptr.dtype.element_ty), mask=out_mask)


def gather(
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    seq: int,
    start: int,
    num_tokens: int,
    key: Tensor,
    value: Tensor,
) -> None:
    """Copy sequence `seq`'s keys and values at positions [start, start + num_tokens) to the first rows of key and
    value, in their dtype, and zero their other rows.

    key, value: [num_rows, num_kv_heads, head_dim], a row's heads contiguous, of equal strides.
    """
    num_rows, num_kv_heads, head_dim = key.shape
    assert key.stride() == value.stride()
    assert key.stride()[1:] == (head_dim, 1)
    _gather_kernel[(num_kv_heads, triton.cdiv(num_rows, TILE_TOKENS))](
        key_cache,
        value_cache,
        key,
        value,
        batch.block_tables,
        batch.rows,
        seq,
        start,
        num_tokens,
        num_rows,
        key_cache.stride(0),
        batch.block_tables.stride(0),
        key.stride(0),
        head_dim,
        key_cache.shape[2],
        TILE_TOKENS,
        triton.next_power_of_2(head_dim),
        num_warps=4,
    )
