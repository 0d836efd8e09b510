"""A number for each KV block that a changed, missing or displaced word changes: to see that a transfer was whole."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.block_checksum import reference
from baton_kernels.block_copy import BlockIds, on_device


def block_checksums(rows: Tensor, block_ids: BlockIds | None = None) -> Tensor:
    """The sum, modulo 2**64, of each 8-byte word of a row mixed with its place in the row. No secret is in it: it tells
    faults, not forgery.

    rows: [n, row_bytes], uint8, where rows may be apart, row_bytes a multiple of 8. block_ids: the rows wanted, in that
    order; None: all. Returns [num_wanted], int64.
    """
    assert rows.dtype == torch.uint8
    assert rows.stride(1) == 1
    assert rows.shape[1] % 8 == 0
    ids = None if block_ids is None else on_device(block_ids, rows.device)
    if rows.is_cuda:
        from baton_kernels.block_checksum import kernel

        return kernel.block_checksums(rows, ids)
    return reference.block_checksums(rows, ids)
