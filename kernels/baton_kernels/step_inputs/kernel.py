"""step_inputs and update_block_tables as Triton kernels.

Arguments may be slices of one small upload, with varying alignment, so nothing is specialized on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launcher import Launcher

TILE = 128


@triton.jit(
    do_not_specialize=["max_blocks", "num_tokens"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "host_ptr", "last_ptr", "ids_ptr", "slots_ptr"],
)
def _step_inputs_kernel(
    rows_ptr,
    positions_ptr,
    host_ptr,
    last_ptr,
    tables_ptr,
    ids_ptr,
    slots_ptr,
    max_blocks,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = token < num_tokens
    row = tl.load(rows_ptr + token, mask=mask, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    host = tl.load(host_ptr + token, mask=mask, other=0)
    real = row >= 0
    last = tl.load(last_ptr + row, mask=real & (host < 0), other=0)
    tl.store(ids_ptr + token, tl.where(real, tl.where(host < 0, last, host), 0).to(tl.int64), mask=mask)
    block = tl.load(tables_ptr + row * max_blocks + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    tl.store(slots_ptr + token, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=mask)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["tables_ptr", "index_ptr", "blocks_ptr"])
def _update_kernel(tables_ptr, index_ptr, blocks_ptr, n, TILE: tl.constexpr):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = entry < n
    index = tl.load(index_ptr + entry, mask=mask, other=0).to(tl.int64)
    tl.store(tables_ptr + index, tl.load(blocks_ptr + entry, mask=mask, other=0), mask=mask)


def step_inputs(
    token_rows: Tensor,
    positions: Tensor,
    host_tokens: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    ids: Tensor,
    slots: Tensor,
) -> None:
    num_tokens = token_rows.shape[0]
    if num_tokens:
        _step_inputs_kernel[(triton.cdiv(num_tokens, TILE),)](
            token_rows,
            positions,
            host_tokens,
            last_tokens,
            block_tables,
            ids,
            slots,
            block_tables.shape[1],
            num_tokens,
            block_size,
            TILE,
            num_warps=4,
        )


_update = Launcher(_update_kernel, num_warps=4)


def update_block_tables(block_tables: Tensor, flat_index: Tensor, blocks: Tensor) -> None:
    n = blocks.shape[0]
    if n:
        _update(flat_index.dtype, (triton.cdiv(n, TILE), 1, 1), block_tables, flat_index, blocks, n, TILE)
