"""The rows of running sequences: each sequence has one from its first step until it is forgotten."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.block_manager import NULL_BLOCK
from engine.config import EngineConfig
from engine.model.rank_step import Int32Array
from engine.model.sampler import Sampler
from engine.sequence import Sequence
from engine.step import Chunk


class InputBatch:
    """Assigns rows to sequences, and knows which part of their block tables each rank has on its device: for each KV
    group a table of all rows.

    Tables only grow while a sequence runs, so a step copies only new entries. The entries of blocks that a sequence has
    given back behind its window stay: their keys have no weight any more, and the blocks hold valid numbers, whoever
    owns them. A row may go to another sequence while a launched step still reads it, because the device runs the copy
    after that step.
    """

    def __init__(self, config: EngineConfig, sampler: Sampler) -> None:
        shape = config.table_shape
        self._width, self._max_blocks = shape.width, shape.num_columns(config.max_model_len)
        self._num_rows = config.max_num_seqs
        self._sampler = sampler
        self._row_of: dict[Sequence, int] = {}
        self._free = list(range(config.max_num_seqs))
        self._num_written = [0] * config.max_num_seqs

    def place(self, chunks: Seq[Chunk]) -> tuple[list[int], Int32Array]:
        """The row of each chunk's sequence, assigned now if it has none; and the entries that bring the block tables up
        to date, see `RankStep.tables`."""
        rows, index, blocks = [], list[int](), list[int]()
        for chunk in chunks:
            seq = chunk.sequence
            row = self._row_of.get(seq)
            if row is None:
                row = self._begin(seq)
            rows.append(row)
            table, written = seq.block_table, self._num_written[row]
            if len(table) > written:
                first, end = written // self._width, len(table) // self._width
                for group in range(self._width):
                    start = (group * self._num_rows + row) * self._max_blocks
                    index += range(start + first, start + end)
                    blocks += _named(table[written + group :: self._width])
                self._num_written[row] = len(table)
        return rows, np.array([index, blocks], dtype=np.int32)

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's row. Idempotent."""
        row = self._row_of.pop(seq, None)
        if row is not None:
            self._free.append(row)

    def _begin(self, seq: Sequence) -> int:
        assert not seq.num_pending_tokens or seq.generates, f"{seq.attempt_id} starts with a token that nobody knows"
        row = self._row_of[seq] = self._free.pop()
        self._num_written[row] = 0
        self._sampler.begin(row, seq.sampling, seq.prompt_tokens, seq.output_tokens)
        return row


def _named(blocks: list[int]) -> list[int]:
    """The blocks, with those behind the window replaced by the first block that is read. Some kernels load whole tiles
    of keys and give those before the window a weight of zero. A NaN, which the null block may hold, would survive
    that."""
    if blocks[0] != NULL_BLOCK:
        return blocks
    first = next(block for block in blocks if block != NULL_BLOCK)
    return [block or first for block in blocks]
