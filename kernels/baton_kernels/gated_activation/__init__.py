"""Activation of a gated MLP: `activation(gate) * up` over the output of one fused projection."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from baton_kernels.gated_activation import reference

Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`, [..., intermediate_size], contiguous.

    gate_up: [..., 2 * intermediate_size], contiguous: gate in the first half, up in the second.
    activation: "gelu" is the exact form, with erf. The activation's result is rounded to the dtype before the product,
        as if the two were separate operations.
    """
    assert gate_up.shape[-1] % 2 == 0
    assert gate_up.is_contiguous()
    assert activation in ACTIVATIONS
    if gate_up.is_cuda:
        from baton_kernels.gated_activation import kernel

        return kernel.gated_activation(gate_up, activation)
    return reference.gated_activation(gate_up, activation)
