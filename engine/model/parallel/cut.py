"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

import math
from typing import NamedTuple


class Runs(NamedTuple):
    """Elements that lie in equal runs at equal distances: `num_runs` of `length`, each beginning `pitch` elements after
    the one before, the first at `first`."""

    first: int
    length: int
    pitch: int
    num_runs: int


class Cut(NamedTuple):
    """Indices [first, end) of dimension `dim` of a tensor of the shape `whole`; if the dimension consists of several
    equal `sections` (gate and up in one tensor), these indices of each. What is beyond dimension 0 is zero."""

    dim: int
    first: int
    end: int
    whole: tuple[int, ...]
    sections: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        part = (self.end - self.first) * self.sections
        return (*self.whole[: self.dim], part, *self.whole[self.dim + 1 :])

    def runs(self) -> Runs:
        """Where its elements are in the whole, in their order."""
        section = self.whole[self.dim] // self.sections
        inner = math.prod(self.whole[self.dim + 1 :])
        first, end = (min(index, section) for index in (self.first, self.end))
        num_runs = math.prod(self.whole[: self.dim]) * self.sections if end > first else 0
        return Runs(first * inner, (end - first) * inner, section * inner, num_runs)
