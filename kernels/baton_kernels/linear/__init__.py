"""Matmuls with a model's weights, for the few rows of a decode step and for the many of a prefill."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.gated_activation import Activation
from baton_kernels.linear import reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out_features].

    x: [..., in_features]. weight: [out_features, in_features], rows contiguous, as in nn.Linear. bias: [out_features].
    """
    assert x.shape[-1] == weight.shape[1]
    return reference.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Return `gated_activation(linear(x, weight, bias), activation)`, [..., intermediate_size], rounded where that is.

    x: [..., in_features]. weight: [2 * intermediate_size, in_features], the gate's rows and then up's.
    """
    assert x.shape[-1] == weight.shape[1]
    return reference.gated_linear(x, weight, activation, bias)
