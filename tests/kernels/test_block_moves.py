"""kv_write and block_copy: every byte where it belongs, and no other byte changed."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from baton_kernels.kv_write import kv_write

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_fills_its_slots_alone(device: str, dtype: torch.dtype) -> None:
    num_blocks, heads, block_size, dim = 6, 3, 4, 8
    pool = torch.full((num_blocks, 2, 2, heads, block_size, dim), -1.0, dtype=dtype, device=device)
    slots = [5, 4, 23, 16]
    key, value = torch.arange(2 * 4 * heads * dim, device=device).to(dtype).view(2, heads, 4, dim).transpose(1, 2)
    kv_write(key, value, pool[:, 1, 0], pool[:, 1, 1], torch.tensor(slots, device=device))
    expected = torch.full_like(pool, -1.0)
    for token, slot in enumerate(slots):
        for head in range(heads):
            expected[slot // block_size, 1, 0, head, slot % block_size] = key[token, head]
            expected[slot // block_size, 1, 1, head, slot % block_size] = value[token, head]
    assert torch.equal(pool, expected)


def numbered(num_blocks: int, block_bytes: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (num_blocks, block_bytes), generator=generator, dtype=torch.uint8).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", [1, 6, 20, 64, 4096])
def test_gather_then_scatter_moves_blocks(block_bytes: int, device: str) -> None:
    source, target = numbered(9, block_bytes, device), torch.zeros((12, block_bytes), dtype=torch.uint8, device=device)
    staging = torch.full((3, block_bytes), 77, dtype=torch.uint8, device=device)
    gather_blocks(source, [8, 1, 4], staging)
    assert torch.equal(staging, source[[8, 1, 4]])
    scatter_blocks(staging, target, [2, 11, 5])
    expected = torch.zeros_like(target)
    expected[[2, 11, 5]] = source[[8, 1, 4]]
    assert torch.equal(target, expected)


def test_staging_memory_may_start_at_any_byte() -> None:
    source = numbered(4, 16, "cpu")
    for offset in range(9):
        memory = torch.zeros(32 + 9, dtype=torch.uint8)
        staging = memory[offset : offset + 32].view(2, 16)
        gather_blocks(source, [3, 0], staging)
        assert torch.equal(staging, source[[3, 0]])
        assert int(memory.count_nonzero()) == int(staging.count_nonzero())


def test_no_blocks_are_no_work() -> None:
    pool = numbered(4, 16, "cpu")
    before = pool.clone()
    gather_blocks(pool, [], pool[:0])
    scatter_blocks(pool[:0], pool, [])
    copy_blocks(pool, [])
    assert torch.equal(pool, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copy_blocks(dtype: torch.dtype, device: str) -> None:
    pool = torch.arange(5 * 2 * 3, device=device).to(dtype).view(5, 2, 3)
    before = pool.clone()
    copy_blocks(pool, [(1, 3), (1, 4), (0, 2)])
    assert torch.equal(pool, before[[0, 1, 0, 1, 1]])


def test_shapes_are_checked() -> None:
    pool = numbered(4, 16, "cpu")
    with pytest.raises(AssertionError):
        gather_blocks(pool, [1, 2], torch.empty((1, 16), dtype=torch.uint8))
    with pytest.raises(AssertionError):
        scatter_blocks(torch.empty((1, 8), dtype=torch.uint8), pool, [1])
