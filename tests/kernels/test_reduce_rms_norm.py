"""reduce_rms_norm: what it makes of parts, that it waits for all of them; and waits for flags."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from baton_kernels.reduce_rms_norm import Parts, kernel, reduce_rms_norm, wait_for_flags
from baton_kernels.rms_norm import reference
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
RULES = {"llama": (0.0, False), "gemma": (1.0, True)}


def rows(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


class Case:
    """Parts of rows of which `rank` owns some, and what becomes of them."""

    def __init__(self, rank: int, size: int, n: int, dtype: torch.dtype, device: str, rule: str, adds: bool) -> None:
        kind: Any = {"dtype": dtype, "device": device}
        all_parts = [rows(5, n, **kind, seed=seed) for seed in range(size)]
        place = rows(size - 1, 9, n, **kind, seed=8)[:, 2:7]  # among those of other pieces
        for away in range(1, size):
            place[away - 1] = all_parts[(rank + away) % size]
        self.flags = torch.ones(size - 1, dtype=torch.int32, device=device)
        self.parts = Parts(all_parts[rank], place, self.flags, rank)
        self.weight = rows(n, **kind, seed=11)
        self.residual = rows(5, n, **kind, seed=12) if adds else None
        self.out = torch.empty(5, n, **kind)
        self.options: dict[str, Any] = dict(zip(("weight_offset", "round_once"), RULES[rule], strict=True))
        total = torch.zeros(5, n, device=device)
        for part in all_parts:
            total = total + part.float()
        self.after = None if self.residual is None else self.residual.clone()
        self.expected = reference.rms_norm(total.to(dtype), self.weight, 1e-5, self.after, *RULES[rule])

    def check(self) -> None:
        torch.testing.assert_close(self.out, self.expected)
        if self.residual is not None and self.after is not None:
            assert torch.equal(self.residual, self.after)


@pytest.mark.parametrize(("rank", "size", "n"), [(0, 2, 64), (1, 4, 80), (3, 4, 4096)])
@pytest.mark.parametrize(("rule", "adds"), [("llama", True), ("gemma", True), ("llama", False)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_sum_is_normed(
    device: str, dtype: torch.dtype, rule: str, adds: bool, rank: int, size: int, n: int
) -> None:
    case = Case(rank, size, n, dtype, device, rule, adds)
    with poisoned():
        kernel.reduce_rms_norm(case.parts, case.weight, 1e-5, case.out, case.residual, *case.options.values())
    case.check()
    again = Case(rank, size, n, dtype, device, rule, adds)
    reduce_rms_norm(again.parts, again.weight, 1e-5, again.out, residual=again.residual, **again.options)
    again.check()


def test_it_waits_for_all_parts() -> None:
    """Each flag is set, and the rows that it stands for are there, only after it was read some times."""
    case = Case(1, 3, 64, torch.float32, "cpu", "llama", adds=True)
    received = case.parts.received.clone()
    case.flags.zero_()
    case.parts.received.fill_(torch.nan)
    reads = []
    load: Any = InterpreterBuilder.create_masked_load

    def late(self: Any, ptrs: Any, *given: Any) -> Any:
        address = int(ptrs.data.flat[0])
        index = (address - case.flags.data_ptr()) // 4
        if 0 <= index < 2:
            reads.append(index)
            if reads.count(index) == 3:
                case.parts.received[index] = received[index]
                case.flags[index] = 1
        return load(self, ptrs, *given)

    with patch.object(InterpreterBuilder, "create_masked_load", late):
        kernel.reduce_rms_norm(case.parts, case.weight, 1e-5, case.out, case.residual, 0.0, False)
    case.check()
    assert reads[:6] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flags_are_cleared_when_all_are_set(device: str) -> None:
    """Those beside them stay."""
    for wait in (wait_for_flags, kernel.wait_for_flags):
        flags = torch.ones(4, 3, dtype=torch.int32, device=device)
        wait(flags[1], flags[2])
        assert flags.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_a_part_that_never_comes_ends_a_wait_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_kernels.reduce_rms_norm.reference.TIMEOUT_S", 0.01)
    set_one, set_all = torch.tensor([1, 0], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for first, second in ((set_one, set_all), (set_all, set_one)):
        with pytest.raises(TimeoutError, match="another rank has sent nothing"):
            wait_for_flags(first, second)
    assert set_all.tolist() == [1, 1]
