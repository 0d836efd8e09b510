"""linear and gated_linear in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from baton_kernels.gated_activation import Activation, gated_activation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation, bias: Tensor | None) -> Tensor:
    return gated_activation(F.linear(x, weight, bias), activation)
