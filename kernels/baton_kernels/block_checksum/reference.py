"""block_checksum in plain torch, relying on int64 wrapping around."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64's constants (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed integers
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def block_checksums(rows: Tensor, block_ids: Tensor | None) -> Tensor:
    wanted = rows if block_ids is None else rows[block_ids]
    words = wanted.contiguous().clone() if wanted.data_ptr() % 8 else wanted.contiguous()
    words = words.view(torch.int64)
    x = words ^ (torch.arange(1, words.shape[1] + 1, device=words.device) * STEP)
    x = (x ^ _shifted(x, 30)) * MIX
    return (x ^ _shifted(x, 27)).sum(dim=1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
