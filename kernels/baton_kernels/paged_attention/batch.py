"""Describes where a flattened batch's tokens and their context lie: built once per step, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class PagedBatch:
    """A step's sequences, with their new tokens concatenated: first `num_decodes` of one token each, then the chunks.

    On the device, int32, read by the kernels (in a CUDA graph the contents change from replay to replay):
    block_tables: [num_rows, max_blocks]; a running sequence keeps its row for as long as it runs.
    rows: [num_seqs], the row of each sequence. query_starts: [num_seqs + 1], cumulative new tokens (cu_seqlens_q).
    context_lens: [num_seqs], including the new tokens; 0 pads a CUDA graph, and that token's output is meaningless.

    On the host: query_lens; host_context_lens, empty in a CUDA graph of decodes, where they are not known.
    plans: what an implementation derived from all this for the step, under its own keys.
    """

    block_size: int
    block_tables: Tensor
    rows: Tensor
    query_starts: Tensor
    context_lens: Tensor
    num_tokens: int
    num_decodes: int
    query_lens: list[int]
    host_context_lens: list[int]
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
        """A batch with its own block tables, a row for each sequence. The given tables may be longer than the context
        needs; the excess is ignored."""
        widths = [-(-length // block_size) for length in context_lens]
        tables = np.zeros((len(widths), max(widths)), dtype=np.int32)
        for row, table, width in zip(tables, block_tables, widths, strict=True):
            row[:width] = table[:width]

        def on_device(values: Any) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

        starts = np.cumsum([0, *query_lens])
        return cls(
            block_size=block_size,
            block_tables=on_device(tables),
            rows=on_device(np.arange(len(widths))),
            query_starts=on_device(starts),
            context_lens=on_device(context_lens),
            num_tokens=int(starts[-1]),
            num_decodes=sum(1 for _ in itertools.takewhile(lambda n: n == 1, query_lens)),
            query_lens=list(query_lens),
            host_context_lens=list(context_lens),
        )

    @property
    def device(self) -> torch.device:
        return self.block_tables.device

    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[num_tokens]: each new token's index in its sequence."""
        pieces = [np.arange(end - n, end) for n, end in zip(self.query_lens, self.host_context_lens, strict=True)]
        return np.concatenate(pieces)

    def slot_mapping(self) -> Tensor:
        """[num_tokens], int64, on the device: each new token's `block * block_size + offset`."""
        positions = torch.from_numpy(self.positions()).to(self.device)
        rows = torch.from_numpy(np.repeat(np.arange(len(self.query_lens)), self.query_lens)).to(self.device)
        blocks = self.block_tables[self.rows[rows], positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size
