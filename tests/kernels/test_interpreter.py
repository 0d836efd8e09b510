"""Triton's interpreter as `tests/interpreter.py` makes it faster."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def first_of_the_larger(a, place, b, other_place):
    is_other = b > a
    return tl.where(is_other, b, a), tl.where(is_other, other_place, place)


@triton.jit
def write_largest(x_ptr, values_ptr, places_ptr, axis: tl.constexpr, keep: tl.constexpr):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    places = rows * 8 + columns
    value, place = tl.reduce((tl.load(x_ptr + places), places), axis, first_of_the_larger, keep_dims=keep)
    at = tl.arange(0, 8 if axis == 0 else 4)
    if keep:
        at = at[None, :] if axis == 0 else at[:, None]
    tl.store(values_ptr + at, value)
    tl.store(places_ptr + at, place)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_reduction_combines_neighbours_in_their_order(axis: int, keep: bool) -> None:
    x = torch.randint(0, 3, (4, 8), generator=torch.Generator().manual_seed(0))
    best = x.amax(axis)
    values, places = torch.full_like(best, -1), torch.full_like(best, -1, dtype=torch.int32)
    write_largest[(1,)](x, values, places, axis, keep)
    assert torch.equal(values, best)
    flat = x.flatten()
    for index, place in enumerate(places.tolist()):
        among = range(index, 32, 8) if axis == 0 else range(index * 8, index * 8 + 8)
        assert place == next(at for at in among if flat[at] == values[index]), "not the first of the largest"
