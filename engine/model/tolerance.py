"""How far the results of two ways to compute the same thing may differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on relative differences. product: for a module's results, the largest difference in a row divided by the
    row's largest value. logits: for a model's logits, the norm of a token's difference divided by the norm of its
    logits, of the median token, since rounding may route a token to another expert."""

    product: float
    logits: float


_ROUNDING = {
    torch.float32: Tolerance(product=1e-5, logits=1e-3),
    torch.float16: Tolerance(product=4e-3, logits=0.3),
    torch.bfloat16: Tolerance(product=2e-2, logits=0.3),
}
"""The 16-bit bounds of products are between 2 and 4 units in the last place. A wrong formula is far above all of them,
except for what the pieces check in fp32. Logits: a random 8B model in bf16 differs by 0.06 from itself computed by
other kernels of torch; a missing addition or rotation gives about 1."""


def rounding(dtype: torch.dtype) -> Tolerance:
    """How far a different order of operations may change the results of a formula in that dtype."""
    return _ROUNDING.get(dtype, _ROUNDING[torch.float32])


def close(actual: Tensor, expected: Tensor, tolerance: Tolerance | None = None) -> bool:
    """Whether two results, [..., width], have the same shape and dtype and differ in each row by at most
    `tolerance.product`; without a tolerance, by at most rounding."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool(close_rows(actual, expected, tolerance).all())


def close_rows(actual: Tensor, expected: Tensor, tolerance: Tolerance | None = None) -> Tensor:
    """For each row of two results of the same shape and dtype, [..., width], whether it is as `close` says: [...]."""
    bound = (tolerance or rounding(expected.dtype)).product
    largest = expected.float().abs().amax(dim=-1)
    difference = (actual.float() - expected.float()).abs().amax(dim=-1)
    return difference <= bound * largest
