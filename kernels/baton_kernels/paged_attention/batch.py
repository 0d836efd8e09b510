"""Where a flattened batch's tokens and their context lie: made once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class PagedBatch:
    """Sequence i has `query_lens[i]` new tokens, the last of `context_lens[i]`; their rows follow one another.

    block_tables: [num_seqs, max_blocks], int32, on the device; rows padded with the null block 0.
    `host_tables`, `query_lens`, `context_lens` say the same to the host. `plans` is what an implementation derived
    from them for this step, under keys of its own.
    """

    block_size: int
    query_lens: list[int]
    context_lens: list[int]
    host_tables: np.ndarray[Any, np.dtype[np.int32]]
    block_tables: Tensor
    plans: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int]],
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
        device: torch.device,
    ) -> PagedBatch:
        """Tables may be longer than their context needs; what is beyond is not read."""
        widths = [-(-length // block_size) for length in context_lens]
        tables = np.zeros((len(widths), max(widths)), dtype=np.int32)
        for row, table, width in zip(tables, block_tables, widths, strict=True):
            row[:width] = table[:width]
        return cls(block_size, query_lens, context_lens, tables, torch.from_numpy(tables).to(device))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def device(self) -> torch.device:
        return self.block_tables.device

    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[num_tokens]: each new token's index in its sequence."""
        pieces = [np.arange(end - n, end) for n, end in zip(self.query_lens, self.context_lens, strict=True)]
        return np.concatenate(pieces)

    def slot_mapping(self) -> Tensor:
        """[num_tokens], int64, on the device: each new token's `block * block_size + offset`."""
        positions = self.positions()
        rows = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        blocks = self.host_tables[rows, positions // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size).to(self.device)
