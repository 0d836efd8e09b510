"""gated_activation: the reference is bit for bit what transformers' MLPs compute, and the kernel agrees with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from baton_kernels.gated_activation import ACTIVATIONS, Activation, gated_activation, reference
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

HF_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
RTOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def values(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Standard normal, with a few far out, where a careless formula overflows."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::7] *= 30
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_transformers(activation: Activation, dtype: torch.dtype) -> None:
    gate_up = values(1, 4, 2 * 48, dtype=dtype, device="cpu")
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(gated_activation(gate_up, activation), ACT2FN[HF_NAMES[activation]](gate) * up)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter; infinity is right
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("intermediate", [1, 96, 1024, 1100])
def test_kernel(intermediate: int, activation: Activation, device: str, dtype: torch.dtype) -> None:
    from baton_kernels.gated_activation import kernel

    for shape in ((1,), (3,), (1, 2)):
        gate_up = values(*shape, 2 * intermediate, dtype=dtype, device=device)
        with poisoned():
            out = kernel.gated_activation(gate_up, activation)
        expected = reference.gated_activation(gate_up, activation)
        # Two units in the last place: one where the activation is rounded and one at the end. Far out on the left the
        # exact gelu is the difference of two numbers near 1, times gates and ups of up to 100.
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=RTOL[dtype])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernel_without_rows(device: str, dtype: torch.dtype) -> None:
    from baton_kernels.gated_activation import kernel

    assert kernel.gated_activation(torch.empty((0, 8), dtype=dtype, device=device), "silu").shape == (0, 4)


@pytest.mark.gpu
def test_kernel_at_the_sizes_of_serving() -> None:
    gate_up = values(4096, 2 * 14336, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(gated_activation(gate_up, "silu"), reference.gated_activation(gate_up, "silu"))
