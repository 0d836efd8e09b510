"""Copies KV blocks: whole ones within a pool, and whole ones or a byte range of each between a pool and contiguous
staging memory on the same device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from baton_kernels.block_copy import reference


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` over block `destination` for each (source, destination).

    pool: [num_blocks, ...], contiguous, any dtype; changed in place. No destination is also a source.
    """
    assert pool.is_contiguous()
    if pairs:
        sources, destinations = on_device(list(zip(*pairs, strict=True)), pool.device)
        _implementation(pool).copy_blocks(pool, sources, destinations)


BlockIds = Sequence[int] | Tensor
"""A sequence, or an [n] int64 tensor that the device's kernels can read, such as pinned host memory. A tensor is not
copied: the caller must keep it until the device has used it."""


def gather_blocks(pool_bytes: Tensor, block_ids: BlockIds, out: Tensor) -> None:
    """Write the blocks, in the order of `block_ids`, to `out`.

    pool_bytes: [num_blocks, piece_bytes], uint8: all of each block, or columns of that tensor. out: [len(block_ids),
    piece_bytes], uint8, contiguous.
    """
    _check(pool_bytes, block_ids, out)
    if len(block_ids):
        _implementation(pool_bytes).gather_blocks(pool_bytes, on_device(block_ids, pool_bytes.device), out)


def scatter_blocks(src: Tensor, pool_bytes: Tensor, block_ids: BlockIds) -> None:
    """Write row i of `src` over block `block_ids[i]`.

    src: [len(block_ids), piece_bytes], uint8, contiguous. pool_bytes: [num_blocks, piece_bytes], uint8: all of each
    block, or columns of that tensor; changed in place. Ids are unique.
    """
    _check(pool_bytes, block_ids, src)
    if len(block_ids):
        _implementation(pool_bytes).scatter_blocks(src, pool_bytes, on_device(block_ids, pool_bytes.device))


Move = Callable[[], None]


class PoolMoves:
    """Repeated `gather_blocks` and `scatter_blocks` of one pool, with the common work done once. On a GPU, the host
    takes longer to launch a move than the GPU takes to run it. So `gather` and `scatter` only prepare the move, and
    calling what they return launches it; the ids may change until then. Callable from any thread.

    pool_bytes: [num_blocks, block_bytes], uint8. `block_ids`: [num_blocks or more], int64, as in `BlockIds`. `staging`:
    uint8, one-dimensional; its first num_blocks * piece_bytes bytes hold the pieces, bytes [offset, offset +
    piece_bytes) of each block. `stream`: the torch.cuda.Stream of the move; None on a CPU.
    """

    def __init__(self, pool_bytes: Tensor) -> None:
        assert pool_bytes.dtype == torch.uint8
        assert pool_bytes.stride(1) == 1
        self._block_bytes = pool_bytes.shape[1]
        self._moves = _implementation(pool_bytes).PoolMoves(pool_bytes)

    def gather(
        self, block_ids: Tensor, num_blocks: int, offset: int, piece_bytes: int, staging: Tensor, stream: Any
    ) -> Move:
        self._check(block_ids, num_blocks, offset, piece_bytes, staging)
        move: Move = self._moves.ready(True, block_ids, num_blocks, offset, piece_bytes, staging, stream)
        return move

    def scatter(
        self, block_ids: Tensor, num_blocks: int, offset: int, piece_bytes: int, staging: Tensor, stream: Any
    ) -> Move:
        """Ids are unique."""
        self._check(block_ids, num_blocks, offset, piece_bytes, staging)
        move: Move = self._moves.ready(False, block_ids, num_blocks, offset, piece_bytes, staging, stream)
        return move

    def _check(self, block_ids: Tensor, num_blocks: int, offset: int, piece_bytes: int, staging: Tensor) -> None:
        assert 0 < num_blocks <= block_ids.numel()
        assert 0 <= offset <= offset + piece_bytes <= self._block_bytes
        assert num_blocks * piece_bytes <= staging.numel()


def _implementation(pool: Tensor) -> ModuleType:
    if pool.is_cuda:
        from baton_kernels.block_copy import kernel

        return kernel
    return reference


def on_device(ids: BlockIds | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copies from pinned memory, so the host does not wait; torch keeps that memory until the copy is complete."""
    if isinstance(ids, Tensor):
        return ids
    if device.type == "cpu":
        return torch.tensor(ids, dtype=torch.int64)
    return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _check(pool_bytes: Tensor, block_ids: BlockIds, staging: Tensor) -> None:
    assert pool_bytes.dtype == staging.dtype == torch.uint8
    assert pool_bytes.device == staging.device
    assert staging.shape == (len(block_ids), pool_bytes.shape[1])
    assert pool_bytes.stride(1) == 1
    assert staging.is_contiguous()
