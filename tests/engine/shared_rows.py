"""Ranks that are threads of this process, and divide the rows of steps as ranks with a GPU each do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine.model.parallel.group import GlooRanks
from engine.model.parallel.sequence_parallel import Copy, CopyQueue, RowMemory, SequenceParallel

MAX_ROWS = 64


class InOrder:
    """Implements CopyQueue: copies at once."""

    is_captured = False

    def start(self, copies: Iterable[Copy]) -> None:
        for to, source, num_bytes in copies:
            ctypes.memmove(to, source, num_bytes)

    def join(self) -> None:
        """All copies have been made."""


def memory(size: int, max_rows: int, width: int, dtype: torch.dtype = torch.float32) -> RowMemory:
    x, received, flags = RowMemory.shapes(size, max_rows, width)
    return RowMemory(
        torch.full(x, torch.nan, dtype=dtype),
        torch.full(received, torch.nan, dtype=dtype),
        torch.zeros(flags, dtype=torch.int32),
    )


class DividedRows(GlooRanks):
    """Divides steps in which each rank has a row, into pieces of at least two; gloo makes the sums of others. shared:
    the memory of all ranks, by rank; a dict that they have in common."""

    def __init__(self, group: Any, shared: dict[int, RowMemory], copies: Callable[[], CopyQueue] = InOrder) -> None:
        self.__dict__.update(group.__dict__)
        self.rows: SequenceParallel | None = None
        self.num_steps = 0
        self._shared, self._queue = shared, copies

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return self.rows is not None and self.rows.active

    @torch.inference_mode(False)
    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel:
        if self.rows is None:
            self._shared[self.rank] = memory(self.size, MAX_ROWS, width, dtype)
            self.minimum(0)
            memories = [self._shared[rank] for rank in range(self.size)]
            self.rows = Counted(self, self.rank, memories, self._queue(), min_own_rows=1, piece_rows=(2, 2))
        return self.rows


class Counted(SequenceParallel):
    def __init__(self, group: DividedRows, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.most_pieces, self.launched_bytes = 3, 0
        self._group = group

    def end(self) -> Tensor:
        self._group.num_steps += 1
        return super().end()
