"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

import math
from typing import NamedTuple


class Runs(NamedTuple):
    """Elements in `num_runs` runs of `length` elements. The first run begins at `first`, each further one `pitch`
    elements after the one before."""

    first: int
    length: int
    pitch: int
    num_runs: int


class Cut(NamedTuple):
    """Indices [first, end) along dimension `dim` of a tensor with the shape `whole`. If the dimension consists of
    several equal `sections` (gate and up in one tensor), the indices count within each section. Indices beyond the end
    of dimension 0 stand for zeros."""

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
        """Where the part's elements are in the whole tensor, in order."""
        section = self.whole[self.dim] // self.sections
        inner = math.prod(self.whole[self.dim + 1 :])
        first, end = (min(index, section) for index in (self.first, self.end))
        num_runs = math.prod(self.whole[: self.dim]) * self.sections if end > first else 0
        return Runs(first * inner, (end - first) * inner, section * inner, num_runs)
