"""Builds a step's model inputs on the device from the batch's state there: token ids, slots, block tables.

Tokens sampled by the previous step may still be only on the device, so the host refers to them by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.step_inputs import reference


def step_inputs(
    token_rows: Tensor,
    positions: Tensor,
    host_tokens: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return (input_ids, slot_mapping), each [num_tokens], int64.

    For token t of row r: `input_ids[t]` is `host_tokens[t]`, or `last_tokens[r]` if that is negative; `slot_mapping[t]`
    is the slot of `positions[t]` in r's blocks. A padding token has row -1: its id is 0 and its slot 0, in the null
    block.

    token_rows, positions, host_tokens: [num_tokens], int32, contiguous.
    last_tokens: [num_rows], int32, contiguous. block_tables: [num_rows, max_blocks], int32, contiguous.
    """
    assert token_rows.shape == positions.shape == host_tokens.shape
    assert token_rows.dtype == positions.dtype == host_tokens.dtype == torch.int32
    assert last_tokens.dtype == block_tables.dtype == torch.int32
    assert last_tokens.shape[0] == block_tables.shape[0]
    assert all(t.is_contiguous() for t in (token_rows, positions, host_tokens, last_tokens, block_tables))
    ids, slots = (torch.empty_like(token_rows, dtype=torch.int64) for _ in range(2))
    if token_rows.is_cuda:
        from baton_kernels.step_inputs import kernel

        kernel.step_inputs(token_rows, positions, host_tokens, last_tokens, block_tables, block_size, ids, slots)
    else:
        reference.step_inputs(token_rows, positions, host_tokens, last_tokens, block_tables, block_size, ids, slots)
    return ids, slots


def update_block_tables(block_tables: Tensor, flat_index: Tensor, blocks: Tensor) -> None:
    """Write `blocks[i]` at `flat_index[i]`, the number of an element: `(group * num_rows + row) * max_blocks + column`.

    block_tables: [num_groups, num_rows, max_blocks], or of one group two dimensions, int32, contiguous; changed in
    place.
    flat_index: [n], int64 or int32, contiguous; entries are unique. blocks: [n], int32, contiguous.
    """
    assert block_tables.dtype == blocks.dtype == torch.int32
    assert flat_index.dtype in (torch.int64, torch.int32)
    assert flat_index.shape == blocks.shape
    assert block_tables.is_contiguous()
    assert flat_index.is_contiguous()
    assert blocks.is_contiguous()
    if block_tables.is_cuda:
        from baton_kernels.step_inputs import kernel

        kernel.update_block_tables(block_tables, flat_index, blocks)
    else:
        reference.update_block_tables(block_tables, flat_index, blocks)
