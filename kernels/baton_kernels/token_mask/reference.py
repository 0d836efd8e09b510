"""apply_token_masks in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)
