"""kv_write and block_copy: every byte where it belongs, and no other byte changed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from baton_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from baton_kernels.kv_write import kv_write

torch.set_num_threads(1)

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "end"), [(0, 64), (32, 64), (6, 20), (1, 2)])
def test_some_bytes_of_each_block_move_alone(first: int, end: int, device: str, kernel: ModuleType) -> None:
    source, target = numbered(9, 96, device), numbered(12, 96, device) ^ 255
    staging = torch.full((3, end - first), 77, dtype=torch.uint8, device=device)
    expected = target.clone()
    expected[[2, 11, 5], first:end] = source[[8, 1, 4], first:end]
    gather_blocks(source[:, first:end], [8, 1, 4], staging)
    assert torch.equal(staging, source[[8, 1, 4], first:end])
    scattered = target.clone()
    scatter_blocks(staging, scattered[:, first:end], [2, 11, 5])
    assert torch.equal(scattered, expected)
    ids, places = (torch.tensor(x, device=device) for x in ([8, 1, 4], [2, 11, 5]))
    kernel.gather_blocks(source[:, first:end], ids, staging.fill_(78))
    kernel.scatter_blocks(staging, target[:, first:end], places)
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


@pytest.fixture
def kernel() -> ModuleType:
    from baton_kernels.block_copy import kernel

    return kernel


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", [1, 6, 20, 64, 8 * 2048, 8 * 2048 + 8, 16 * 2048 + 24])
def test_kernel_moves_blocks_and_nothing_else(block_bytes: int, device: str, kernel: ModuleType) -> None:
    source = numbered(9, block_bytes, device)
    ids, places = (torch.tensor(x, device=device) for x in ([8, 1, 4], [2, 6, 0]))
    memory = torch.full((5, block_bytes), 77, dtype=torch.uint8, device=device)
    kernel.gather_blocks(source, ids, memory[1:4])
    assert torch.equal(memory[1:4], source[ids])
    assert bool((memory[[0, 4]] == 77).all())
    target = numbered(7, block_bytes, device) ^ 255
    expected = target.clone()
    expected[places] = source[ids]
    kernel.scatter_blocks(memory[1:4], target, places)
    assert torch.equal(target, expected)
    kernel.copy_blocks(target, places[:2], torch.tensor([3, 5], device=device))
    expected[[3, 5]] = expected[[2, 6]]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_takes_staging_memory_that_starts_at_any_byte(device: str, kernel: ModuleType) -> None:
    source = numbered(4, 16, device)
    for offset in range(9):
        memory = torch.zeros(32 + 9, dtype=torch.uint8, device=device)
        staging = memory[offset : offset + 32].view(2, 16)
        kernel.gather_blocks(source, torch.tensor([3, 0], device=device), staging)
        assert torch.equal(staging, source[[3, 0]])
        assert int(memory.count_nonzero()) == int(staging.count_nonzero())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_kernel_copies_blocks_of_any_dtype(dtype: torch.dtype, device: str, kernel: ModuleType) -> None:
    pool = torch.arange(5 * 2 * 3, device=device).to(dtype).view(5, 2, 3)
    before = pool.clone()
    kernel.copy_blocks(pool, *(torch.tensor(x, device=device) for x in ([1, 1, 0], [3, 4, 2])))
    assert torch.equal(pool, before[[0, 1, 0, 1, 1]])


@pytest.mark.gpu
def test_blocks_of_megabytes_beyond_two_gigabytes() -> None:
    """Offsets into the pool do not fit 32 bits, nor do those of 8-byte words times 8."""
    block_bytes = 2 << 20
    pool = torch.zeros((2100, block_bytes), dtype=torch.uint8, device="cuda")
    staging = numbered(2, block_bytes, "cuda")
    scatter_blocks(staging, pool, [2099, 1])
    copy_blocks(pool, [(2099, 2098), (1, 1050)])
    out = torch.empty((4, block_bytes), dtype=torch.uint8, device="cuda")
    gather_blocks(pool, [2098, 1050, 2099, 0], out)
    assert torch.equal(out[:3], staging[[0, 1, 0]])
    assert not out[3].any()


def test_shapes_are_checked() -> None:
    pool = numbered(4, 16, "cpu")
    with pytest.raises(AssertionError):
        gather_blocks(pool, [1, 2], torch.empty((1, 16), dtype=torch.uint8))
    with pytest.raises(AssertionError):
        scatter_blocks(torch.empty((1, 8), dtype=torch.uint8), pool, [1])
