"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """Indices [first, end) of dimension `dim`, 0 or 1, of a tensor of the shape `whole`. What is beyond the tensor is
    zero."""

    dim: int
    first: int
    end: int
    whole: tuple[int, ...]

    def runs(self) -> list[tuple[int, int]]:
        """Where its elements are in the whole, in their order: (first element, number of elements) each."""
        num_rows, columns = self.whole[0], self._row_elements
        if self.dim == 0:
            first, end = min(self.first, num_rows), min(self.end, num_rows)
            return [(first * columns, (end - first) * columns)] if end > first else []
        return [(row * columns + self.first, self.end - self.first) for row in range(num_rows)]

    @property
    def _row_elements(self) -> int:
        product = 1
        for length in self.whole[1:]:
            product *= length
        return product
