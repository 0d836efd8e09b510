"""Moves whole KV blocks: within a pool, and between a pool and contiguous staging memory on the same device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.block_copy import reference


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` over block `destination` for each (source, destination).

    pool: [num_blocks, ...], contiguous, any dtype; changed in place. No destination is also a source.
    """
    assert pool.is_contiguous()
    if pairs:
        ids = torch.tensor(pairs, dtype=torch.int64, device=pool.device)
        reference.copy_blocks(pool, ids[:, 0], ids[:, 1])


def gather_blocks(pool_bytes: Tensor, block_ids: Sequence[int], out: Tensor) -> None:
    """Write the blocks, in the order of `block_ids`, to `out`.

    pool_bytes: [num_blocks, block_bytes], uint8, contiguous. out: [len(block_ids), block_bytes], likewise.
    """
    _check(pool_bytes, block_ids, out)
    if block_ids:
        reference.gather_blocks(pool_bytes, _ids(block_ids, pool_bytes), out)


def scatter_blocks(src: Tensor, pool_bytes: Tensor, block_ids: Sequence[int]) -> None:
    """Write row i of `src` over block `block_ids[i]`.

    src: [len(block_ids), block_bytes], uint8, contiguous. pool_bytes: [num_blocks, block_bytes], likewise; changed in
    place. No id twice.
    """
    _check(pool_bytes, block_ids, src)
    if block_ids:
        reference.scatter_blocks(src, pool_bytes, _ids(block_ids, pool_bytes))


def _ids(block_ids: Sequence[int], pool: Tensor) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=pool.device)


def _check(pool_bytes: Tensor, block_ids: Sequence[int], staging: Tensor) -> None:
    assert pool_bytes.dtype == staging.dtype == torch.uint8
    assert pool_bytes.device == staging.device
    assert staging.shape == (len(block_ids), pool_bytes.shape[1])
    assert pool_bytes.is_contiguous()
    assert staging.is_contiguous()
