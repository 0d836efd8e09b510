"""all_reduce_rms_norm in separate steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton_kernels.rms_norm import rms_norm


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    all_reduce: Callable[[Tensor], Tensor],
    residual: Tensor | None,
    weight_offset: float,
    round_once: bool,
    quantize: torch.dtype | None,
) -> Tensor:
    return rms_norm(
        all_reduce(x),
        weight,
        eps,
        residual=residual,
        weight_offset=weight_offset,
        round_once=round_once,
        quantize=quantize,
    )
