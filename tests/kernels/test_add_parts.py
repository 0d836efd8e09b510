"""add_parts: the sum in fp32, rounded once, in both places."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.add_parts import add_parts, reference
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("num_others", [1, 3])
def test_reference_rounds_once(num_others: int) -> None:
    own = torch.full((5,), 256.0, dtype=torch.bfloat16)
    others, copy = torch.ones(num_others, 5, dtype=torch.bfloat16), torch.empty(5, dtype=torch.bfloat16)
    add_parts(own, others, copy)
    assert own.tolist() == copy.tolist() == [float(torch.tensor(256.0 + num_others, dtype=torch.bfloat16))] * 5


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_others", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 4096, 10_001])
def test_kernel(n: int, num_others: int, device: str, dtype: torch.dtype) -> None:
    from baton_kernels.add_parts import kernel

    generator = torch.Generator().manual_seed(n)
    own = torch.randn(n, generator=generator).to(dtype).to(device)
    others = torch.randn(num_others, -(-n // 128) * 128, generator=generator).to(dtype).to(device)[:, :n]
    expected, of_reference = own.clone(), torch.empty_like(own)
    reference.add_parts(expected, others, of_reference)
    with poisoned():
        copy = torch.empty_like(own)
        kernel.add_parts(own, others, copy)
    assert torch.equal(own, expected)
    assert torch.equal(copy, of_reference)
