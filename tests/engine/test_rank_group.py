"""Collectives of ranks on CPUs: small tensors are combined by rank 0, large ones go around among all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.model.parallel.group import GlooRanks, RankGroup
from tests.engine.rank_threads import TIMEOUT_S, in_threads

Results = list[list[torch.Tensor]]
Call = Callable[[RankGroup], list[torch.Tensor]]
OnAllRanks = Callable[[int, Call], Results]


def over_gloo(size: int, call: Call) -> Results:
    store, joined = HashStore(), threading.Barrier(size)

    def join(rank: int) -> list[torch.Tensor]:
        group = GlooRanks(store, rank, size, TIMEOUT_S)
        joined.wait(TIMEOUT_S)  # a rank that ends at once would break the connections of those that still join
        return call(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size), timeout=TIMEOUT_S))


def over_threads(size: int, call: Call) -> Results:
    """The ranks that other tests have."""
    results: dict[int, list[torch.Tensor]] = {}

    def run(group: RankGroup) -> None:
        results[group.rank] = call(group)

    with in_threads(size, run) as group:
        run(group)
    return [results[rank] for rank in range(size)]


@pytest.fixture(params=[over_gloo, over_threads])
def on_all_ranks(request: pytest.FixtureRequest) -> OnAllRanks:
    return request.param


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks(size: int, on_all_ranks: OnAllRanks) -> None:
    """So all ranks choose the same experts: each computes the router from such sums."""
    lengths = 0, 1, 7, 1000, 65_537

    def summed(group: RankGroup) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(group.rank)
        return [group.all_reduce(torch.randn(length, generator=generator)) for length in lengths]

    first, *others = on_all_ranks(size, summed)
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for length, own in zip(lengths, first, strict=True):
        torch.testing.assert_close(own, sum(torch.randn(length, generator=generator) for generator in generators))
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(0, 2), (3, 1), (2, 3, 4), (4, 20_000)])
def test_gathered_tensors_lie_side_by_side_in_the_order_of_ranks(
    shape: tuple[int, ...], size: int, on_all_ranks: OnAllRanks
) -> None:
    parts = [rank * 1e6 + torch.arange(torch.Size(shape).numel()).view(shape) for rank in range(size)]
    for (gathered,) in on_all_ranks(size, lambda group: [group.all_gather(parts[group.rank].mT.contiguous().mT)]):
        assert torch.equal(gathered, torch.cat(parts, dim=-1))


def test_the_smallest_number_and_what_rank_0_has(on_all_ranks: OnAllRanks) -> None:
    def both(group: RankGroup) -> list[torch.Tensor]:
        own = torch.full((3,), group.rank)
        group.broadcast(own)
        return [torch.tensor(group.minimum(1 << 40 if group.rank else -(1 << 40) - 7)), own]

    for smallest, first in on_all_ranks(3, both):
        assert int(smallest) == -(1 << 40) - 7
        assert first.tolist() == [0, 0, 0]


def test_only_contiguous_tensors_can_be_received(on_all_ranks: OnAllRanks) -> None:
    def refused(group: RankGroup) -> list[torch.Tensor]:
        with pytest.raises(RuntimeError, match="contiguous"):
            group.receive(torch.zeros(2, 3).mT, 1 - group.rank)
        return []

    on_all_ranks(2, refused)
