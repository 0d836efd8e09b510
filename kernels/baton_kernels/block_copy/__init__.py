"""Moves KV blocks: whole ones within a pool, and whole ones or a range of their bytes between a pool and contiguous
staging memory on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

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
"""A sequence, or what `host_numbers` made of one: no copy to the device is needed then, and the caller keeps it until
the device has used it."""


def host_numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[len(numbers)] int64 on the host, where kernels of `device` can read it."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")


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
    block, or columns of that tensor; changed in place. No id twice.
    """
    _check(pool_bytes, block_ids, src)
    if len(block_ids):
        _implementation(pool_bytes).scatter_blocks(src, pool_bytes, on_device(block_ids, pool_bytes.device))


def _implementation(pool: Tensor) -> ModuleType:
    if pool.is_cuda:
        from baton_kernels.block_copy import kernel

        return kernel
    return reference


def on_device(ids: BlockIds | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """From pinned memory, so that nobody waits for the copy; torch keeps that memory until it is done."""
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
