"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

import math
from typing import NamedTuple

Span = tuple[int, int]
"""Indices from the first up to, and without, the second."""


class Runs(NamedTuple):
    """Elements in `num_runs` runs of `length` elements. The first run begins at `first`, each further one `pitch`
    elements after the one before."""

    first: int
    length: int
    pitch: int
    num_runs: int


class Cut(NamedTuple):
    """The indices of `spans` along dimension `dim` of a tensor with the shape `whole`, one span after another: several
    for a tensor that consists of several (q, k and v; gate and up). Indices beyond the end of dimension 0 stand for
    zeros."""

    dim: int
    spans: tuple[Span, ...]
    whole: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        part = sum(end - first for first, end in self.spans)
        return (*self.whole[: self.dim], part, *self.whole[self.dim + 1 :])

    def runs(self) -> list[Runs]:
        """Where the elements of each span are in the whole tensor, in order."""
        size, inner = self.whole[self.dim], math.prod(self.whole[self.dim + 1 :])
        clipped = [tuple(min(index, size) for index in span) for span in self.spans]
        num_runs = math.prod(self.whole[: self.dim])
        return [Runs(first * inner, (end - first) * inner, size * inner, num_runs) for first, end in clipped]
