"""What the tests of experts have in common: where they run, how exactly, and who chooses whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
RELATIVE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The largest difference in a row, over the row's largest value."""


def choices(num_tokens: int, top_k: int, num_experts: int, device: str) -> tuple[Tensor, Tensor]:
    """ids and weights."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return ids.to(device), (torch.rand(num_tokens, top_k) + 0.1).to(device)
