"""kv_write and block_copy: every byte where it belongs, and no other byte changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from baton_kernels.block_copy import PoolMoves, copy_blocks, gather_blocks, scatter_blocks
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", [6, 20, 96, 4096])
def test_moves_of_one_pool_again_and_again(block_bytes: int, device: str, kernel: ModuleType) -> None:
    """Other blocks, columns and places each time, some of which were there before."""
    rng = random.Random(block_bytes)
    source, target = numbered(9, block_bytes, device), numbered(12, block_bytes, device) ^ 255
    ids = torch.zeros(5, dtype=torch.int64, pin_memory=device == "cuda")
    stream = torch.cuda.Stream() if device == "cuda" else None
    plain = [(PoolMoves(source), PoolMoves(target))]
    in_triton = [(kernel.PoolMoves(source), kernel.PoolMoves(target))] if device == "cpu" else []
    memory = torch.zeros(6 * block_bytes, dtype=torch.uint8, device=device)
    for _ in range(12):
        num_blocks, start = rng.randint(1, 5), rng.choice([0, 8, 16, 3])
        first, end = rng.choice([(0, block_bytes), (block_bytes // 2, block_bytes), (0, 3)])
        places, named = rng.sample(range(12), num_blocks), rng.sample(range(9), num_blocks)
        expected = target.clone()
        expected[places, first:end] = source[named, first:end]
        before = target.clone()
        staging = memory[start:]
        for gathering, scattering in plain + in_triton:
            target.copy_(before)
            memory.fill_(77)
            synchronize(device)
            args = num_blocks, first, end - first, staging, stream
            ids[:num_blocks] = torch.tensor(named)
            if isinstance(gathering, PoolMoves):
                gathering.gather(ids, *args)()
            else:
                gathering.ready(True, ids, *args)()
            synchronize(device)
            pieces = staging[: num_blocks * (end - first)].view(num_blocks, -1)
            assert torch.equal(pieces, source[named, first:end])
            assert bool((memory[:start] == 77).all())
            assert bool((staging[pieces.numel() :] == 77).all())
            ids[:num_blocks] = torch.tensor(places)
            if isinstance(scattering, PoolMoves):
                scattering.scatter(ids, *args)()
            else:
                scattering.ready(False, ids, *args)()
            synchronize(device)
            assert torch.equal(target, expected)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Recorder:
    """In the place of a Triton kernel, and of what it compiles: what was launched, addresses as numbers."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.num_compiled = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Recorder]:
        def launch(*args: object, num_warps: int = 0, stream: int | None = None) -> Recorder:
            self.num_compiled += num_warps > 0
            numbers = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.launches.append((*(*grid, 1)[:3], *numbers, stream))
            return self

        return launch

    def graph(self, device: torch.device, launch: Callable[[int], object], num_addresses: int) -> SimpleNamespace:
        """In the place of a KernelGraph: launches what is captured, but for addresses, programs and stream."""
        launch(0)
        captured = self.launches.pop()
        programs, rest = captured[1:3], captured[3 + num_addresses : -1]

        def again(addresses: tuple[int, ...], num_programs: int, stream: int) -> None:
            assert len(addresses) == num_addresses
            self.launches.append((num_programs, *programs, *addresses, *rest, stream))

        return SimpleNamespace(launch=again)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_move_that_was_seen_before_is_launched_as_the_first_was(gathers: bool, kernel: ModuleType) -> None:
    pool, memory = numbered(9, 96, "cpu"), torch.zeros(400, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    ids, stream = torch.tensor([3, 1, 2]), SimpleNamespace(cuda_stream=7)
    recorder = Recorder()
    with patch.multiple(kernel, _move_kernel=recorder, KernelGraph=recorder.graph):
        moves = kernel.PoolMoves(pool)
        for offset, size, start in ((0, 96, 0), (32, 32, 0), (32, 32, 8), (33, 31, 1)):
            moves.ready(gathers, ids, 1, offset, size, memory[start:], None)()
        for offset, size, start in ((0, 96, 16), (64, 32, 32), (0, 32, 24), (49, 31, 33), (32, 32, 0)):
            kernel.PoolMoves(pool).ready(gathers, ids, 2, offset, size, memory[start:], None)()
            num_compiled = recorder.num_compiled
            moves.ready(gathers, ids, 2, offset, size, memory[start:], stream)()
            usual, prepared = recorder.launches[-2:]
            assert prepared == (*usual[:-1], 7)
            assert recorder.num_compiled == num_compiled
        moves.ready(gathers, ids, 1, 1, 31, memory, None)()  # another alignment: not seen before
        assert recorder.num_compiled == num_compiled + 1


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
