"""Steps as CUDA graphs: one launch instead of hundreds.

Decodes take a graph of a ladder of batch sizes, a few short prompts one of a ladder of token counts: in both cases the
next larger one, so that the ladder is finer where what pads a batch costs more. Larger prompts keep a GPU busy for
longer than their launches take, and have faster attention when their lengths are known (512 tokens of an 8B model on an
H200: 15 ms op by op, of which the GPU worked 11).

All graphs share one pool of memory, since no two run at once, and the larger ones are captured first.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch
from baton_kernels.step_inputs import step_inputs
from engine.model.batch import BatchSize, DeviceState, Int32Array, ModelInputs, decode_inputs, pack, unpack
from engine.step import Chunk
from engine.upload import upload_to

Forward = Callable[[ModelInputs], Tensor]

PROMPT_SIZES = (32, 64, 128, 256, 512)
MAX_PROMPTS = 8
MAX_PROMPT_CONTEXT = 8192
"""Op by op, keys of a longer context are split over more programs than a graph without it could know of."""


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes of decodes to capture."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1024, 128)]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, 1024)]


class StepGraphs:
    """Graphs of `forward`. Owns their static inputs and outputs."""

    def __init__(self, forward: Forward, state: DeviceState, decode_sizes: Seq[int], prompt_sizes: Seq[int]) -> None:
        self._decode_sizes, self._prompt_sizes = sorted(decode_sizes), sorted(prompt_sizes)
        capture = _Capture(forward, state)
        self._prompts = {size: _PromptGraph(capture, size) for size in reversed(self._prompt_sizes)}
        self._decodes = {size: _DecodeGraph(capture, size) for size in reversed(self._decode_sizes)}
        torch.cuda.synchronize()

    def run(self, chunks: Seq[Chunk], rows: list[int]) -> Tensor | None:
        """Launch a step of chunks in the order of `decodes_first`. Logits [num_sampling, vocab_size], valid until the
        next run; None when no graph fits, and nothing was launched."""
        graph: _DecodeGraph | _PromptGraph | None = None
        if all(chunk.length == 1 and chunk.samples_token for chunk in chunks):
            graph = self._decodes.get(_fitting(self._decode_sizes, len(chunks)))
        elif len(chunks) <= MAX_PROMPTS and max(chunk.end for chunk in chunks) <= MAX_PROMPT_CONTEXT:
            graph = self._prompts.get(_fitting(self._prompt_sizes, sum(chunk.length for chunk in chunks)))
        return None if graph is None else graph.run(chunks, rows)


def _fitting(sizes: list[int], wanted: int) -> int:
    """The smallest size that is not below `wanted`; 0: none is."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else 0


@dataclass(slots=True)
class _Capture:
    """Captures graphs that share a pool."""

    forward: Forward
    state: DeviceState
    pool: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # what is compiled or allocated once must not happen while capturing
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = step()
        return graph, logits

    def on_device(self, packed: Int32Array) -> Tensor:
        return torch.from_numpy(packed).to(self.state.block_tables.device)


class _DecodeGraph:
    def __init__(self, capture: _Capture, size: int) -> None:
        state = capture.state
        self._size = size
        self._packed = capture.on_device(decode_inputs([], [], size))
        rows, positions, host_tokens, context_lens = self._packed.unbind()
        starts = torch.arange(size + 1, dtype=torch.int32, device=rows.device)

        def step() -> Tensor:
            ids, slots = step_inputs(
                rows, positions, host_tokens, state.last_tokens, state.block_tables, state.block_size
            )
            lengths = [1] * size
            paged = PagedBatch(
                state.block_size, state.block_tables, rows, starts, context_lens, size, size, lengths, []
            )
            return capture.forward(ModelInputs(ids, positions, slots, paged, None))

        self._graph, self._logits = capture(step)

    def run(self, chunks: Seq[Chunk], rows: list[int]) -> Tensor:
        upload_to(self._packed, decode_inputs(chunks, rows, self._size))
        self._graph.replay()
        return self._logits[: len(chunks)]


class _PromptGraph:
    def __init__(self, capture: _Capture, num_tokens: int) -> None:
        self._size = size = BatchSize(MAX_PROMPTS, num_tokens, MAX_PROMPTS)
        self._packed = capture.on_device(pack([], [], size))
        bounds = [num_tokens] * MAX_PROMPTS

        def step() -> Tensor:
            return capture.forward(unpack(self._packed, size, capture.state, bounds, []))

        self._graph, self._logits = capture(step)

    def run(self, chunks: Seq[Chunk], rows: list[int]) -> Tensor:
        upload_to(self._packed, pack(chunks, rows, self._size))
        self._graph.replay()
        return self._logits[: sum(chunk.samples_token for chunk in chunks)]
