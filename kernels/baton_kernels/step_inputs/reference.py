"""step_inputs and update_block_tables in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    padding = token_rows < 0
    rows, places = token_rows.clamp(min=0).long(), positions.long()
    ids.copy_(torch.where(host_tokens < 0, last_tokens[rows], host_tokens).masked_fill(padding, 0))
    blocks = block_tables[rows, places.masked_fill(padding, 0) // block_size].long()
    slots.copy_((blocks * block_size + places % block_size).masked_fill(padding, 0))


def update_block_tables(block_tables: Tensor, flat_index: Tensor, blocks: Tensor) -> None:
    block_tables.view(-1)[flat_index.long()] = blocks
