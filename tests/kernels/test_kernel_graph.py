"""Kernels that are launched as CUDA graphs of their own: moves of blocks are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.block_copy import PoolMoves
from baton_kernels.kernel_graph import KernelGraph

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def pool() -> Tensor:
    """[64, 4096]: a block has its own number everywhere."""
    found = torch.arange(64, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 4096)
    torch.cuda.synchronize()
    return found


def test_each_launch_has_its_own_arguments_and_runs_in_turn(pool: Tensor) -> None:
    """Also those that wait while the next one is prepared."""
    stream: Any = torch.cuda.Stream()
    moves, ids = PoolMoves(pool), torch.arange(63, -1, -1, device=DEVICE)
    slots = torch.zeros(32, 3 * 4096, dtype=torch.uint8, device=DEVICE)
    for slot in slots[:2]:  # the first compiles the kernel, and the second launches the graph for the first time
        moves.gather(ids, 3, 0, 4096, slot, stream)()
    stream.synchronize()
    slots.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
    for first in range(32):
        moves.gather(ids[first:], 1 + first % 3, 0, 4096, slots[first], stream)()
    assert not stream.query(), "nothing waits for the sleeper"
    stream.synchronize()
    found = slots.view(32, 3, 4096)
    for first in range(32):
        num = 1 + first % 3
        expected = torch.tensor([63 - first - i if i < num else 0 for i in range(3)], dtype=torch.uint8, device=DEVICE)
        assert torch.equal(found[first], expected[:, None].expand(3, 4096))


def test_moves_of_any_alignment(pool: Tensor) -> None:
    """Each kind has a kernel of its own."""
    pool += torch.arange(4096, device=DEVICE).to(torch.uint8)
    stream: Any = torch.cuda.Stream()
    moves, ids = PoolMoves(pool), torch.tensor([5, 2, 7], device=DEVICE)
    for _ in range(2):  # the first of each kind compiles its kernel
        for offset, num_bytes in ((0, 4096), (8, 1024), (1, 77)):
            staging = torch.zeros(3 * num_bytes, dtype=torch.uint8, device=DEVICE)
            torch.cuda.synchronize()
            moves.gather(ids, 3, offset, num_bytes, staging, stream)()
            stream.synchronize()
            assert torch.equal(staging.view(3, num_bytes), pool[ids, offset : offset + num_bytes])


def test_threads_share_a_graph(pool: Tensor) -> None:
    moves, stream = PoolMoves(pool), torch.cuda.Stream()
    ids = torch.arange(64, device=DEVICE)
    slots = torch.zeros(64, 4096, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    moves.gather(ids, 1, 0, 4096, slots[0], stream)()

    def work(first: int) -> None:
        for _ in range(20):
            for block in range(first, 64, 4):
                moves.gather(ids[block:], 1, 0, 4096, slots[block], stream)()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert torch.equal(slots, pool)


def test_a_capture_that_fails_leaves_the_next_one_alone(pool: Tensor) -> None:
    def fail(stream: int) -> None:
        raise ValueError("as it must")

    with pytest.raises(ValueError, match="as it must"):
        KernelGraph(DEVICE, fail, 1)
    test_moves_of_any_alignment(pool)
