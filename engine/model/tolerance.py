"""How far two ways to compute the same may be apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of relative differences. product: of a module's results, the largest difference over the largest value of
    a row. logits: of the logits of a whole model, as norms of vectors; the median token's, since rounding may send one
    to another expert."""

    product: float
    logits: float


_ROUNDING = {
    torch.float32: Tolerance(product=1e-5, logits=1e-3),
    torch.float16: Tolerance(product=4e-3, logits=0.3),
    torch.bfloat16: Tolerance(product=2e-2, logits=0.3),
}
"""The 16-bit products are between 2 and 4 units in the last place; a wrong formula is far above all of them, but for
what the pieces check in fp32. Logits: a random 8B model in bf16 is 0.06 away from itself computed by other kernels of
torch; a forgotten addition or rotation gives about 1."""


def rounding(dtype: torch.dtype) -> Tolerance:
    """What the order of operations of one formula may change in results of that dtype."""
    return _ROUNDING.get(dtype, _ROUNDING[torch.float32])


def close(actual: Tensor, expected: Tensor, tolerance: Tolerance | None = None) -> bool:
    """Whether two results, [..., width], of one shape and dtype differ by no more than `tolerance.product`, row by row;
    without one, by no more than rounding."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    bound = (tolerance or rounding(expected.dtype)).product
    largest = expected.float().abs().amax(dim=-1)
    difference = (actual.float() - expected.float()).abs().amax(dim=-1)
    return bool((difference <= bound * largest).all())
