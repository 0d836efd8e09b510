"""rms_norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, weight_offset: float, round_once: bool
) -> Tensor:
    if residual is not None:
        x = residual.add_(x)
    row = x.float()
    row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    if round_once:
        return (row * (weight.float() + weight_offset)).to(x.dtype).contiguous()
    return (row.to(x.dtype) * weight).contiguous()
