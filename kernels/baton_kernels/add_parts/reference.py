"""add_parts in plain torch."""

from __future__ import annotations

from torch import Tensor


def add_parts(own: Tensor, others: Tensor, copy: Tensor) -> None:
    total = own.float()
    for other in others:
        total = total + other.float()
    own.copy_(total)
    copy.copy_(own)
