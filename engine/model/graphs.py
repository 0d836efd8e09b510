"""Decode steps as CUDA graphs: one launch instead of hundreds, for a ladder of batch sizes.

A batch takes the next larger graph; what pads it has row -1 and an empty context. Larger graphs are captured first, so
that the smaller ones fit the memory that the first one took: all share one pool, since no two run at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch
from baton_kernels.step_inputs import step_inputs
from engine.model.batch import Int32Array, ModelInputs, decode_inputs
from engine.step import Chunk

Forward = Callable[[ModelInputs], Tensor]


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: finer where a padded row costs a larger share."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1024, 64)]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, 1024)]


class DecodeGraphs:
    """Graphs of `forward` over batches of one token each. Owns their static inputs and outputs."""

    def __init__(
        self, forward: Forward, sizes: Seq[int], block_tables: Tensor, last_tokens: Tensor, block_size: int
    ) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in reversed(self._sizes):
            self._graphs[size] = _Graph(forward, size, block_tables, last_tokens, block_size, pool, side)
        torch.cuda.synchronize()

    def fits(self, chunks: Seq[Chunk]) -> bool:
        """Whether there is a graph for them: each has one token and samples the next."""
        return len(chunks) <= self._sizes[-1] and all(chunk.length == 1 and chunk.samples_token for chunk in chunks)

    def run(self, chunks: Seq[Chunk], rows: list[int]) -> Tensor:
        """Launch a step. Returns logits [num_chunks, vocab_size], valid until the next run."""
        size = self._sizes[bisect.bisect_left(self._sizes, len(chunks))]
        return self._graphs[size].replay(decode_inputs(chunks, rows, size))[: len(chunks)]


class _Graph:
    def __init__(
        self,
        forward: Forward,
        size: int,
        block_tables: Tensor,
        last_tokens: Tensor,
        block_size: int,
        pool: Any,
        side: torch.cuda.Stream,
    ) -> None:
        device = block_tables.device
        self._packed = torch.from_numpy(decode_inputs([], [], size)).to(device)
        rows, positions, host_tokens, context_lens = self._packed.unbind()
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)

        def step() -> Tensor:
            ids, slots = step_inputs(rows, positions, host_tokens, last_tokens, block_tables, block_size)
            paged = PagedBatch(block_size, block_tables, rows, starts, context_lens, size, size, [1] * size, [])
            return forward(ModelInputs(ids, positions, slots, paged, None))

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # what is compiled or allocated once must not happen while capturing
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=side):
            self._logits = step()

    def replay(self, packed: Int32Array) -> Tensor:
        self._packed.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._logits
