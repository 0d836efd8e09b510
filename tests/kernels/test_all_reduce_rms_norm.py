"""all_reduce_rms_norm: what a rank sends, what it makes of what arrives, and that it waits for all of it.

In the interpreter one rank runs: what others send is put into its buffer before. Ranks with a GPU each are in
`tests/node/test_gpu_ranks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from baton_kernels.all_reduce_rms_norm import NUM_PROGRAMS, REGION_BYTES, PeerMemory, all_reduce_rms_norm
from baton_kernels.quantized_linear import quantized_rows
from baton_kernels.quantized_linear.tiling import WEIGHT_ONLY_ROWS
from baton_kernels.rms_norm import reference
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

LLAMA, GEMMA = (0.0, False), (1.0, True)


PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def rows(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """On a GPU with so few bits that their sums are exact in fp32: its compiler chooses the order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    if device == "cuda":
        values = (values * 256).round() / 256
    return values.to(dtype).to(device)


@dataclass
class Ranks:
    """Buffers of `size` ranks, of which `rank` computes."""

    rank: int
    size: int
    device: str = "cpu"
    num_programs: int = NUM_PROGRAMS
    buffers: list[Tensor] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)  # of each program

    def __post_init__(self) -> None:
        shape = 2, self.size - 1, NUM_PROGRAMS, REGION_BYTES
        self.buffers = [torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        assert self.buffers[0].nbytes == PeerMemory.num_bytes(self.size)
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device=self.device)
        turns = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=self.device)
        self.memory = PeerMemory(self.rank, self.size, addresses, turns, self.num_programs)

    def place(self, of: int, sender: int, row: int, like: Tensor) -> Tensor:
        """Where rank `of` finds that row of the sender's part, in the next call."""
        program, index = row % self.num_programs, row // self.num_programs
        region = self.buffers[of][self.calls[program] % 2, (of - sender) % self.size - 1, program]
        return region[index * like.nbytes :][: like.nbytes].view(like.dtype)

    def sent(self, sender: int, parts: list[Tensor], sums: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """What a rank sends: to whom, and the place of each value beside it."""
        num_rows, n = sums.shape
        share = self.memory.share_bytes(n * sums.itemsize) // sums.itemsize
        for row in range(num_rows):
            for of in set(range(self.size)) - {sender}:
                place, part = self.place(of, sender, row, sums[row]), parts[sender][row]
                if share == n:
                    yield of, place, part
                    continue
                for at, values in ((0, part[of * share :]), (share, sums[row, sender * share :])):
                    yield of, place[at:][: len(values[:share])], values[:share]

    def run(
        self, parts: list[Tensor], sums: Tensor, weight: Tensor, residual: Tensor | None, rule: tuple[float, bool]
    ) -> Tensor:
        """The rank's result, with what the others send there. Checks what it sends. sums: of the parts, and of the
        residual."""
        for sender in set(range(self.size)) - {self.rank}:
            for of, place, values in self.sent(sender, parts, sums):
                if of == self.rank:
                    place.copy_(values)
        own = parts[self.rank].clone()
        offset, once = rule
        kinds: dict[str, Any] = {"residual": residual, "weight_offset": offset, "round_once": once}
        with poisoned():
            out = all_reduce_rms_norm(own, weight, 1e-5, torch.neg, self.memory, **kinds)
        for _, place, values in self.sent(self.rank, parts, sums):
            assert torch.equal(place, values)
            place.view(torch.uint8).fill_(0xFF)  # that rank takes it
        self.calls.update(range(min(len(own), self.num_programs)))
        assert all(bool((buffer.view(torch.int64) == -1).all()) for buffer in self.buffers)
        return out


def check(ranks: Ranks, num_rows: int, n: int, dtype: torch.dtype, rule: tuple[float, bool], adds: bool) -> None:
    kind: Any = {"dtype": dtype, "device": ranks.device}
    parts = [rows(num_rows, n, **kind, seed=seed) for seed in range(ranks.size)]
    weight, residual = rows(n, **kind, seed=11), rows(num_rows, n, **kind, seed=12) if adds else None
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    after = None if residual is None else residual.clone()
    expected = reference.rms_norm(total.to(dtype), weight, 1e-5, after, *rule)
    sums = total.to(dtype) if after is None else after
    torch.testing.assert_close(ranks.run(parts, sums, weight, residual, rule), expected)
    if residual is not None and after is not None:
        assert torch.equal(residual, after)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_calls_of_any_shape_after_one_another(device: str, dtype: torch.dtype, rank: int, size: int) -> None:
    """More programs, fewer, others again: each goes on with the half of its regions that is its next."""
    ranks = Ranks(rank, size, device)
    check(ranks, 1, 64, dtype, LLAMA, adds=True)
    check(ranks, 3, 80, dtype, GEMMA, adds=True)
    check(ranks, 2, 4096, dtype, LLAMA, adds=False)
    check(ranks, 0, 64, dtype, LLAMA, adds=True)
    check(ranks, 3, 64, dtype, LLAMA, adds=True)


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (3, 4)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_two_shots(device: str, dtype: torch.dtype, rank: int, size: int) -> None:
    """Each rank sums its columns; between calls with one shot, of other shapes, with several rows a program."""
    ranks = Ranks(rank, size, device, num_programs=5)
    for num_rows, n, rule, adds in ((1, 8, LLAMA, True), (12, 80, LLAMA, True), (2, 8, GEMMA, True)):
        check(ranks, num_rows, n, dtype, rule, adds)
    check(ranks, 7, 256, dtype, GEMMA, adds=False)
    check(ranks, 12, 80, dtype, LLAMA, adds=True)
    assert ranks.memory.share_bytes(80 * dtype.itemsize) < 80 * dtype.itemsize
    assert ranks.memory.share_bytes(8 * dtype.itemsize) == 8 * dtype.itemsize


@pytest.mark.parametrize(("device", "n"), [("cpu", 8), pytest.param("cuda", 4096, marks=pytest.mark.gpu)])
def test_a_program_has_several_rows(device: str, n: int) -> None:
    check(Ranks(0, 2, device), 2 * NUM_PROGRAMS + 1, n, torch.float32, LLAMA, adds=True)
    check(Ranks(0, 2, device, num_programs=3), 8, n, torch.float32, LLAMA, adds=True)  # of a GPU with few SMs


def test_a_row_is_summed_when_all_of_it_is_there() -> None:
    """Another rank sends when it has this one's part: an element at a time, the last one first, between two looks."""
    ranks = Ranks(0, 2)
    part, own, weight = rows(1, 16), rows(1, 16, seed=1), rows(16, seed=2)
    got, place = ranks.place(1, 0, 0, own[0]), ranks.place(0, 1, 0, part[0])
    missing = list(range(16))
    look = InterpreterBuilder.create_masked_load

    def send_and_look(builder: Any, ptrs: Any, mask: Any, other: Any, cache: Any, evict: Any, volatile: bool) -> Any:
        if volatile:
            assert torch.equal(got, own[0])
            column = missing.pop()
            place[column] = part[0, column]
        return look(builder, ptrs, mask, other, cache, evict, volatile)

    with patch.object(InterpreterBuilder, "create_masked_load", send_and_look):
        out = all_reduce_rms_norm(own, weight, 1e-5, torch.neg, ranks.memory)
    assert not missing
    torch.testing.assert_close(out, reference.rms_norm(own + part, weight, 1e-5, None, *LLAMA))


def test_a_nan_of_any_bits_arrives() -> None:
    """Also one of the bits that stand for what has not arrived: the other rank would wait for it."""
    ranks = Ranks(0, 2)
    own, part = rows(1, 64), rows(1, 64)
    own.view(torch.int32)[0, 5] = -1
    ranks.place(0, 1, 0, part[0]).copy_(part[0])
    out = all_reduce_rms_norm(own, rows(64), 1e-5, torch.neg, ranks.memory)
    sent = ranks.place(1, 0, 0, own[0])
    assert sent.isnan().tolist() == [column == 5 for column in range(64)]
    assert not (sent.view(torch.int32) == -1).any()
    assert out.isnan().all()


def test_rows_carry_themselves_quantized() -> None:
    """As the norm alone makes them, of more than a few rows."""
    from baton_kernels.rms_norm import kernel

    ranks, num_rows = Ranks(0, 2), WEIGHT_ONLY_ROWS + 1
    own, part, weight = rows(num_rows, 64), rows(num_rows, 64, seed=1), rows(64, seed=2)
    for row in range(num_rows):
        ranks.place(0, 1, row, part[row]).copy_(part[row])
    found = quantized_rows(all_reduce_rms_norm(own, weight, 1e-5, torch.neg, ranks.memory, quantize=torch.int8))
    expected = torch.empty(num_rows, 64, dtype=torch.int8), torch.empty(num_rows, 1)
    kernel.rms_norm(own + part, weight, 1e-5, None, *LLAMA, expected)
    assert found is not None
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_what_can_be_taken() -> None:
    memory = Ranks(0, 2).memory
    assert memory.can_take(1024, 8192)
    assert not memory.can_take(1025, 8192)
    assert memory.can_take(128, 16384 + 16)
    assert not memory.can_take(1, 8192 + 8)  # no whole number of 16 bytes
    assert not memory.can_take(1, REGION_BYTES + 16)
    more = PeerMemory(0, 8, memory.addresses, memory.turns)
    assert more.can_take(585, 8192)  # in two shots: twice an eighth, of seven ranks
    assert not more.can_take(586, 8192)
    assert not more.can_take(100_000, 16)  # in one


def test_shares_of_rows() -> None:
    memory = Ranks(0, 2).memory
    assert memory.share_bytes(8192) == 8192
    more = PeerMemory(0, 4, memory.addresses, memory.turns)
    assert more.share_bytes(16384) == 4096
    assert more.share_bytes(2000) == 512  # 500, in whole units of 16 bytes
    assert more.share_bytes(48) == 48  # too few units for four ranks


def test_without_memory_in_common_the_steps_are_separate() -> None:
    x, weight, residual = rows(2, 64), rows(64, seed=1), rows(2, 64, seed=2)
    expected = reference.rms_norm(2 * x, weight, 1e-5, residual.clone(), *LLAMA)
    assert torch.equal(all_reduce_rms_norm(x, weight, 1e-5, lambda x: 2 * x, None, residual=residual), expected)
