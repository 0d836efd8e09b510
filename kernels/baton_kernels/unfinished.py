"""Results whose last step is left to the RMS norm that reads them, which has their rows in registers anyway.

What is left is attached to the result. Only a reader that looks for it (`left_of`) may read such a result. Whatever
makes another tensor of it, such as `view`, loses what is attached: see `viewed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LEFT = "baton_left"


class Scales(NamedTuple):
    """Scales by which the rows and the columns of a product are still to be multiplied. rows: [num_rows, 1], fp32.
    columns: [n], fp32."""

    rows: Tensor
    columns: Tensor


class ChosenParts(NamedTuple):
    """The results of each token's experts, which are still to be summed; the result that they are attached to has no
    values yet.

    parts: [num_tokens * top_k, n], of the result's dtype. ids: [num_tokens, top_k], int64; a part of `num_experts` or
    above was not written, and counts as zeros. slot_mapping: [num_tokens], int64; the same holds for all parts of
    tokens with slot 0. None: no token is padding.
    """

    parts: Tensor
    ids: Tensor
    slot_mapping: Tensor | None
    num_experts: int

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


Left = Scales | ChosenParts


def unfinished(x: Tensor, left: Left) -> Tensor:
    """Attach what is left to do, and return x, for a reader that does it."""
    setattr(x, _LEFT, left)
    return x


def left_of(x: Tensor) -> Left | None:
    """What `unfinished` has attached to x; None: x is complete."""
    found: Left | None = x.__dict__.get(_LEFT)
    return found


def viewed(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x as a view of this shape, whose rows are the same, with what is attached to x."""
    left = left_of(x)
    return x.view(shape) if left is None else unfinished(x.view(shape), left)


def finished(x: Tensor) -> Tensor:
    """x with everything done that is left to do, in plain torch."""
    left = left_of(x)
    if left is None:
        return x
    rows = _summed(left) if isinstance(left, ChosenParts) else _scaled(x, left)
    return rows.to(x.dtype).view(x.shape)


def _scaled(x: Tensor, left: Scales) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float() * left.rows * left.columns


def _summed(left: ChosenParts) -> Tensor:
    """[num_tokens, n], fp32; the parts of a token are added one by one, in order."""
    taken = left.ids < left.num_experts
    if left.slot_mapping is not None:
        taken = taken & (left.slot_mapping > 0)[:, None]
    parts = left.parts.view(*left.ids.shape, -1).float().masked_fill(~taken[..., None], 0.0)
    total = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        total += part
    return total
