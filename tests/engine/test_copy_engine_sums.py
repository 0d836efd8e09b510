"""All-reduces by copy engines: each rank gets the sum, whatever the order in which streams get on."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.model.parallel.copy_engine_sums
from engine.model.parallel.copy_engine_sums import (
    NUM_SLOTS,
    PIECE_ROWS,
    SLOT_BYTES,
    CopyEngineSums,
    copied_rows,
)

torch.set_num_threads(1)

Step = Callable[[], bool]
"""A stream's work. False: it cannot be done yet."""


class QueuedStream:
    """A stream whose work is done when `Streams` says so. done: how much of it is."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.queue, self.queued, self.done = deque[Step](), 0, 0
        streams.all.append(self)

    def add(self, step: Step) -> None:
        self.queue.append(step)
        self.queued += 1

    def follow(self, other: QueuedStream) -> None:
        until = other.queued
        self.add(lambda: other.done >= until)

    def run(self, launch: Callable[[], None]) -> None:
        self._do(launch)

    def copy(self, to: int, of: int, num_bytes: int) -> None:
        self._do(lambda: ctypes.memmove(to, of, num_bytes))

    def signal(self, flags: Sequence[int]) -> None:
        def send() -> None:
            for flag in flags:
                assert _flag(flag).value == 0, "a signal that nobody has seen is set again"
                _flag(flag).value = 1

        self._do(send)

    def wait(self, flags: Sequence[int]) -> None:
        def take() -> bool:
            if not all(_flag(flag).value for flag in flags):
                return False
            for flag in flags:
                _flag(flag).value = 0
            return True

        self.add(take)

    def _do(self, call: Callable[[], object]) -> None:
        self.add(lambda: call() is not self)


class Streams:
    """The streams of all ranks, which get on in an order that `seed` decides."""

    def __init__(self, seed: int) -> None:
        self.all = list[QueuedStream]()
        self._random = random.Random(seed)

    def finish(self) -> None:
        """Do all that is queued."""
        while waiting := [stream for stream in self.all if stream.queue]:
            self._random.shuffle(waiting)
            assert any(self._step(stream) for stream in waiting), "the streams wait for each other"

    def _step(self, stream: QueuedStream) -> bool:
        if not stream.queue[0]():
            return False
        stream.queue.popleft()
        stream.done += 1
        return True


def _copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of)


def _flag(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class Ranks:
    """Ranks with one stream each for products."""

    def __init__(self, size: int, seed: int) -> None:
        self.streams = Streams(seed)
        self.memory = [torch.zeros(CopyEngineSums.num_bytes(size), dtype=torch.uint8) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self.memory]
        self.products = [QueuedStream(self.streams) for _ in range(size)]
        self.sums = [
            CopyEngineSums(rank, memory, addresses, partial(self.products.__getitem__, rank), self._stream)
            for rank, memory in enumerate(self.memory)
        ]

    def _stream(self) -> QueuedStream:
        return QueuedStream(self.streams)

    def all_reduce(self, rank: int, x: Tensor, piece_rows: int) -> Tensor:
        """What RowParallelLinear does: x becomes the sum, in pieces, each of which is computed before it is summed."""
        out, stream = torch.full_like(x, float("nan")), self.products[rank]
        waits = []
        for number, (piece, computed) in enumerate(
            zip(torch.split(out, piece_rows), torch.split(x, piece_rows), strict=True)
        ):
            stream.run(partial(_copy, piece, computed))
            waits.append(self.sums[rank].start(piece, number))
        for wait in waits:
            wait()
        return out


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.parallel.copy_engine_sums.SLOT_BYTES", 64 * 1024)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 4),
    sums=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50), st.integers(5, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_rank_gets_the_sum(size: int, sums: list[tuple[int, int, int]], seed: int, dtype: torch.dtype) -> None:
    """Of one tensor after another, of other sizes and numbers of pieces, without a wait for the other ranks between."""
    ranks = Ranks(size, seed)
    generator = torch.Generator().manual_seed(seed)
    expected, found = [], []
    for num_rows, width, piece_rows in sums:
        piece_rows = max(piece_rows, -(-num_rows // NUM_SLOTS))
        parts = [torch.randn(num_rows, width, generator=generator).to(dtype) for _ in range(size)]
        expected.append(torch.stack(parts).float().sum(0).to(dtype))
        results = [ranks.all_reduce(rank, part, piece_rows) for rank, part in enumerate(parts)]
        kept = [result.clone() for result in results]
        for rank, (result, copy) in enumerate(zip(results, kept, strict=True)):
            ranks.products[rank].run(partial(_copy, copy, result))  # as work that reads the sum
        found.append((results, kept))
    ranks.streams.finish()
    for total, (results, kept) in zip(expected, found, strict=True):
        for result, copy in zip(results, kept, strict=True):
            assert torch.equal(result, results[0])
            assert torch.equal(copy, result)
            torch.testing.assert_close(result, total)
    flags = [memory[-NUM_SLOTS * 2 * size * 4 :] for memory in ranks.memory]
    assert not any(flag.any() for flag in flags)


@given(num_rows=st.integers(1, 100_000), row_bytes=st.integers(1, 2000).map(lambda n: 16 * n))
def test_pieces_have_memory(num_rows: int, row_bytes: int) -> None:
    rows = copied_rows(num_rows, row_bytes)
    num_pieces = -(-num_rows // rows) if rows else 0
    assert num_pieces <= NUM_SLOTS
    assert rows % PIECE_ROWS == 0
    assert rows * row_bytes <= engine.model.parallel.copy_engine_sums.SLOT_BYTES


def test_long_prompts_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8B and 70B models in 16 bits."""
    monkeypatch.setattr("engine.model.parallel.copy_engine_sums.SLOT_BYTES", SLOT_BYTES)
    assert [copied_rows(num_rows, 8192) for num_rows in (1100, 2048, 8192, 8193, 16384)] == [
        1024,
        1024,
        1024,
        2048,
        2048,
    ]
    assert [copied_rows(num_rows, 16384) for num_rows in (8192, 8193)] == [1024, 0]


def _rank_on_gpu(rank: int, memory: list[Tensor], parts: Tensor, captured: bool) -> None:
    """A rank's process. It maps the memory of all ranks. Exits with 1 if the sums are wrong."""
    from baton_kernels.copy_stream import CopyStream, current_stream

    def make_stream() -> CopyStream:
        return CopyStream(torch.cuda.Stream(priority=-1))

    sums = CopyEngineSums(rank, memory[rank], [one.data_ptr() for one in memory], current_stream, make_stream)
    out, part = torch.empty_like(parts[rank]), parts[rank]

    def all_reduce(factor: float) -> Tensor:
        waits = []
        for number, piece in enumerate(torch.split(out, PIECE_ROWS)):
            torch.mul(torch.split(part, PIECE_ROWS)[number], factor, out=piece)
            waits.append(sums.start(piece, number))
        for wait in waits:
            wait()
        return out * 2  # what reads the sum

    with torch.cuda.stream(torch.cuda.Stream()):
        results = [all_reduce(factor) for factor in (1, 2, 3)]
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [all_reduce(factor) for factor in (1, 2, 3)]
            graph.replay()
            graph.replay()
        torch.cuda.synchronize()
    for factor, result in zip((1, 2, 3), results, strict=True):
        torch.testing.assert_close(result, (parts * factor).float().sum(0).bfloat16() * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_one_gpu(size: int, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real copies and signals between processes: one tensor after another, also in a graph that is launched twice."""
    from torch import multiprocessing

    monkeypatch.setattr("engine.model.parallel.copy_engine_sums.SLOT_BYTES", SLOT_BYTES)  # as in the other processes
    memory = [torch.zeros(CopyEngineSums.num_bytes(size), dtype=torch.uint8, device="cuda") for _ in range(size)]
    parts = torch.randn(size, 3000, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank_on_gpu, args=(rank, memory, parts, captured)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * size
