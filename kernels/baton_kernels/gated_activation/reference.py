"""gated_activation in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
