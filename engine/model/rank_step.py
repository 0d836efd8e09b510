"""A step as numbers: what each rank of a node needs to compute its part of the forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
EAGER = -1
ALL_TOKENS = -1
_HEADER = 10


@dataclass(frozen=True, slots=True)
class RankStep:
    """All arrays are int32.

    graph: the index of the captured step (`StepGraphs.run`), or EAGER. packed: the inputs, see `batch.pack`.
    num_tokens: without padding. num_logits: rows of logits that are wanted, or ALL_TOKENS. lengths, ends: [num_seqs],
    of each chunk. tables: [2, n], new entries of the block tables, flattened: their places, and the blocks. fresh:
    blocks to clear first. scored: [n, 2], pieces of the batch (first token, number of tokens) whose logits are wanted
    in addition, one piece at a time. num_tokens_across_dp: [num_nodes], the tokens of each data parallel node; a node
    with 0 only computes its experts for the others. Empty: there is one node.
    """

    graph: int
    packed: Int32Array
    num_tokens: int
    num_logits: int
    lengths: Int32Array
    ends: Int32Array
    tables: Int32Array
    fresh: Int32Array
    scored: Int32Array
    num_tokens_across_dp: Int32Array

    @classmethod
    def idle(cls, graph: int, packed: Int32Array, num_tokens_across_dp: list[int]) -> RankStep:
        """The step of a data parallel node without tokens."""
        none, pairs = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
        return cls(
            graph, packed, 0, 0, none, none, pairs.reshape(2, 0), none, pairs, np.array(num_tokens_across_dp, np.int32)
        )

    def to_array(self) -> Int32Array:
        """One array for `from_array`."""
        arrays = self.packed, self.lengths, self.ends, self.tables, self.fresh, self.scored, self.num_tokens_across_dp
        header = [self.graph, self.num_tokens, self.num_logits, *(array.size for array in arrays)]
        return np.concatenate([np.array(header, np.int32), *(array.reshape(-1) for array in arrays)])

    @classmethod
    def from_array(cls, array: Int32Array) -> RankStep:
        """The step that `to_array` has turned into the array; its arrays are views of it."""
        graph, num_tokens, num_logits, *sizes = array[:_HEADER].tolist()
        ends = np.cumsum(sizes)[:-1]
        packed, lengths, chunk_ends, tables, fresh, scored, num_tokens_across_dp = np.split(
            array[_HEADER : _HEADER + sum(sizes)], ends
        )
        tables, scored = tables.reshape(2, -1), scored.reshape(-1, 2)
        return cls(
            graph, packed, num_tokens, num_logits, lengths, chunk_ends, tables, fresh, scored, num_tokens_across_dp
        )
