"""Checksums of KV blocks that detect changed, missing and displaced words: they verify that a transfer was complete."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.block_checksum import reference
from baton_kernels.block_copy import BlockIds, on_device


def block_checksums(rows: Tensor, block_ids: BlockIds | None = None) -> Tensor:
    """Sum, modulo 2**64, of a row's 8-byte words, each mixed with its index in the row. No secret is involved: this
    detects faults, not tampering.

    rows: [n, row_bytes], uint8, any row stride, row_bytes a multiple of 8. block_ids: the rows wanted, in that order;
    None: all. Returns [num_wanted], int64.
    """
    assert rows.dtype == torch.uint8
    assert rows.stride(1) == 1
    assert rows.shape[1] % 8 == 0
    ids = None if block_ids is None else on_device(block_ids, rows.device)
    if rows.is_cuda:
        from baton_kernels.block_checksum import kernel

        return kernel.block_checksums(rows, ids)
    return reference.block_checksums(rows, ids)
