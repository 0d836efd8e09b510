"""Steps as CUDA graphs: one launch instead of hundreds.

Decodes use graphs of a ladder of batch sizes, one ladder for each number of tokens that a sequence may have. A few
short prompts use graphs of a ladder of token counts, and such prompts with decodes use graphs with places for both. A
batch is padded to the next larger size, so a ladder is finer where padding costs more. A prompt that is alone in its
step, from its first token on, has graphs of its own where attention is faster for squares: the padding comes after the
prompt, so none of its tokens attends to it. Larger prompts keep a GPU busy for longer than their launches take, and
have faster attention when their lengths are known. The time of a launch depends on the host: 1024 tokens of an 8B model
take an H200 23 ms and 2048 take it 43, and launching either takes 22 to 38 ms of Python in a serving node.

A graph of prompts is cut after each group of layers that a prefill node sends separately, so that events between its
pieces show which layers are computed.

All graphs share one memory pool, since no two run at once, and the larger ones are captured first.
"""

from __future__ import annotations

import bisect
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton_kernels.streams import side_stream
from engine.config import EngineConfig
from engine.model.batch import BatchSize, DeviceState, Int32Array, ModelInputs, num_singles, pack, unpack
from engine.model.layer_marks import SeesLayers
from engine.model.upload import upload_to
from engine.step import Chunk
from engine.step_padding import StepPadding

Forward = Callable[[ModelInputs, SeesLayers | None], Tensor]

PROMPT_SIZES = (32, 64, 128, 256, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
MIXED_ROWS = {
    32: (128, 384, 512, 640, 768, 896, 1056),
    64: (256, 512, 768, 1088),
    128: (512, 1152),
}
"""Token counts of graphs for steps with decodes and prompts, by the number of places for decodes. Graphs for a whole
budget of prompt tokens are captured as well, since most chunks of long prompts are that long. The counts fill whole
tiles of matmuls: on an H200, 640 rows of an 8B model take 13.4 ms, 672 take 15.5, 768 take 16.0. With more decodes,
there are fewer counts: each graph keeps the logits of all places, and padding costs less than launching the step op by
op."""
FINE_MIXED_ROWS = {
    32: (64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 896, 1056),
    64: (128, 160, 192, 256, 320, 384, 512, 768, 1088),
    128: (192, 256, 384, 512, 768, 1152),
}
"""The same for nodes with a target for a step's time. Only a choice of many counts lets steps use the target up, and a
step that is launched op by op exceeds it."""
SINGLE_PROMPT_SIZES = (2048,)
"""Token counts of graphs for a prompt that is alone in its step. In a graph for several prompts, 2048 tokens of an 8B
model take an H200 45.0 ms, of which attention takes 3.8; cuDNN's attention for one prompt of known length takes 2.7."""
MAX_PROMPTS = 8
MAX_PROMPT_CONTEXT = 8192
"""Prompts with a longer context run op by op, so that attention is planned with the context length, which a graph does
not know."""


def step_padding(config: EngineConfig, most_prompt_tokens: int, most_mixed_tokens: int) -> StepPadding:
    """Which steps with prompts to capture. most_prompt_tokens, most_mixed_tokens: the most prompt tokens of a captured
    step without and with decodes."""
    budget = config.max_num_batched_tokens
    ladders = {0: [size for size in PROMPT_SIZES if size <= min(budget, most_prompt_tokens)]}
    enough = 0  # places for decodes
    for places, rows in (FINE_MIXED_ROWS if config.target_itl_s else MIXED_ROWS).items():
        if enough < config.max_num_seqs:
            sizes = {*(count - places for count in rows), budget}
            ladders[places] = sorted(size for size in sizes if size <= min(budget, most_mixed_tokens))
            enough = places
    found = tuple((places, tuple(sizes)) for places, sizes in ladders.items() if sizes)
    return StepPadding(found, MAX_PROMPTS, MAX_PROMPT_CONTEXT)


def single_prompt_sizes(budget: int, most: int) -> list[int]:
    """Token counts to capture for a prompt that is alone in its step, from its first token on. budget: the most tokens
    of a step. most: the largest count to capture."""
    return [size for size in SINGLE_PROMPT_SIZES if size <= min(budget, most)]


def decode_capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decodes to capture."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1024, 128)]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, 1024)]


def num_logits_rows(decode_sizes: Iterable[int], padding: StepPadding) -> int:
    """How many rows of logits all graphs keep together, if steps give each sequence one token."""
    return sum(decode_sizes) + sum((places + MAX_PROMPTS) * len(sizes) for places, sizes in padding.ladders)


class StepNeeds(NamedTuple):
    """What a graph must have room for; with data parallel nodes, the maximum over the nodes, number by number.

    A step of decodes only: num_seqs sequences of up to query_len tokens each. A step with prompts (has_prompts, else
    0): num_singles sequences with one token each, and num_prompts others with num_prompt_tokens tokens in all, of
    which the furthest ends at position prompt_end.
    """

    query_len: int
    num_seqs: int
    num_singles: int
    num_prompts: int
    num_prompt_tokens: int
    prompt_end: int
    has_prompts: int

    @classmethod
    def of(cls, chunks: Seq[Chunk]) -> StepNeeds:
        """chunks: in the order of `singles_first`."""
        singles = num_singles(chunks)
        prompts, has_prompts = chunks[singles:], not all(chunk.is_decode for chunk in chunks)
        if has_prompts and not prompts:
            return NO_GRAPH  # a graph computes logits for all places of single tokens
        return cls(
            query_len=max((chunk.length for chunk in prompts), default=1),
            num_seqs=len(chunks),
            num_singles=singles,
            num_prompts=len(prompts),
            num_prompt_tokens=sum(chunk.length for chunk in prompts),
            prompt_end=max((chunk.end for chunk in prompts), default=0),
            has_prompts=int(has_prompts),
        )


NO_GRAPH = StepNeeds(*[1 << 30] * len(StepNeeds._fields))
"""The needs of a step that must be launched op by op."""


class StepGraphs:
    """Graphs of `forward`, each of which begins with `begin`. Owns their static inputs and outputs. padding: the sizes
    of steps with prompts. group_ends: the layers, counted from 1, after which graphs of prompts are cut.
    decode_query_lens: for each ladder of decode graphs, the most tokens of a sequence."""

    def __init__(
        self,
        forward: Forward,
        state: DeviceState,
        decode_sizes: Seq[int],
        padding: StepPadding,
        single_prompt_sizes: Seq[int] = (),
        group_ends: tuple[int, ...] = (),
        decode_query_lens: Seq[int] = (1,),
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        assert not padding.ladders or padding.most_prompts in range(1, MAX_PROMPTS + 1), "graphs have no more room"
        self._decode_query_lens = sorted(decode_query_lens)
        self._decode_sizes, self._square_sizes = sorted(decode_sizes), sorted(single_prompt_sizes)
        self._padding = padding
        capture = _Capture(begin, forward, state, group_ends, self._decode_query_lens[-1])
        steps = sorted(((places, size) for places, sizes in padding.ladders for size in sizes), key=sum, reverse=True)
        lengths_and_sizes = itertools.product(reversed(self._decode_query_lens), reversed(self._decode_sizes))
        with _no_garbage_collection():
            self._squares = {size: _PromptGraph(capture, size, is_square=True) for size in reversed(self._square_sizes)}
            self._prompts = {(places, size): _PromptGraph(capture, size, places) for places, size in steps}
            self._decodes = {(length, size): _DecodeGraph(capture, size, length) for length, size in lengths_and_sizes}
        self._all: list[StepGraph] = [*self._squares.values(), *self._prompts.values(), *self._decodes.values()]
        for index, graph in enumerate(self._all):
            graph.index = index
        torch.cuda.synchronize()

    def run(self, index: int, packed: Int32Array, marks: SeesLayers | None = None) -> Tensor:
        """Launch the step whose inputs graph `index` has packed. Returns its logits, with padding, [., vocab_size],
        valid until the next run."""
        return self._all[index].run(packed, marks)

    def fitting(self, chunks: Seq[Chunk]) -> StepGraph | None:
        """The graph for a step of chunks in the order of `singles_first`; None: there is none."""
        graph, prompt = self.with_room(StepNeeds.of(chunks)), chunks[0]
        if len(chunks) == 1 and prompt.start == 0 and prompt.length > 1 and not prompt.is_decode:
            square = self._squares.get(_fitting(self._square_sizes, prompt.length))
            can_take = self._padding.takes(1, prompt.end)
            if square and can_take and (graph is None or square.num_tokens <= graph.num_tokens):
                return square
        return graph

    def with_room(self, needs: StepNeeds) -> StepGraph | None:
        """The smallest graph that has room; None: there is none."""
        if not needs.has_prompts:
            lengths, sizes = self._decode_query_lens, self._decode_sizes
            return self._decodes.get((_fitting(lengths, needs.query_len), _fitting(sizes, needs.num_seqs)))
        if not self._padding.takes(needs.num_prompts, needs.prompt_end):
            return None
        fitting = self._padding.fitting(needs.num_singles, needs.num_prompt_tokens)
        return self._prompts[fitting] if fitting else None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """While a graph is captured, the capturing thread must not free memory or graphs, as destructors of garbage do.
    Other threads may, such as NCCL's, which poll for the ends of collectives."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fitting(sizes: list[int], wanted: int) -> int:
    """The smallest size that is at least `wanted`; 0: there is none."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else 0


class _Pieces:
    """A step as graphs that are replayed in a row. During the capture it implements SeesLayers, to cut after layer
    groups."""

    def __init__(self, pool: Any, group_ends: tuple[int, ...]) -> None:
        self._pool = pool
        self._cut_after = group_ends
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._ends: list[int] = []

    def capture(self, step: Callable[[_Pieces], Tensor]) -> Tensor:
        """Capture on the current stream, which must not be the default one."""
        self._begin()
        try:
            output = step(self)
        except BaseException:
            with suppress(RuntimeError):  # the failure may have ended the capture already
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()
        return output

    def written(self, layer: int) -> None:
        if layer + 1 in self._cut_after:
            self._graphs[-1].capture_end()
            self._ends.append(layer + 1)
            self._begin()

    def replay(self, marks: SeesLayers | None = None) -> None:
        for graph, end in itertools.zip_longest(self._graphs, self._ends):
            graph.replay()
            if marks is not None and end is not None:
                marks.written(end - 1)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)


class _Capture:
    """Captures graphs that share a memory pool, which requires one stream for all of them.

    most_logits: the most rows of logits that a sequence has.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        forward: Forward,
        state: DeviceState,
        group_ends: tuple[int, ...],
        most_logits: int,
    ) -> None:
        self.begin, self.forward = begin, forward
        self.state = state
        self.group_ends = group_ends
        self.most_logits = most_logits
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = side_stream(state.block_tables.device)

    def __call__(
        self, step: Callable[[SeesLayers | None], Tensor], group_ends: tuple[int, ...] = ()
    ) -> tuple[_Pieces, Tensor]:
        pieces = _Pieces(self._pool, group_ends)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step(None)  # nothing may be compiled, or allocated for good, while capturing
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            logits = pieces.capture(step)
        torch.cuda.current_stream().wait_stream(self._stream)
        return pieces, logits

    def step(
        self, packed: Tensor, size: BatchSize, query_lens: list[int], context_lens: list[int], marks: SeesLayers | None
    ) -> Tensor:
        """What is captured: the logits of the step that is packed on the device."""
        self.begin()
        return self.forward(unpack(packed, size, self.state, query_lens, context_lens), marks)

    def on_device(self, packed: Int32Array) -> Tensor:
        return torch.from_numpy(packed).to(self.state.block_tables.device)


class StepGraph:
    """A captured step. Owns its inputs and its logits. index: see `StepGraphs.run`. num_tokens: including padding.
    places: see `pack`."""

    index: int
    num_tokens: int
    _size: BatchSize
    _places: int | None
    _packed: Tensor
    _graph: _Pieces
    _logits: Tensor

    def pack(self, chunks: Seq[Chunk], rows: list[int]) -> Int32Array:
        """The step's inputs, for `StepGraphs.run`."""
        return pack(chunks, rows, self._size, self._places)

    def run(self, packed: Int32Array, marks: SeesLayers | None) -> Tensor:
        upload_to(self._packed, packed)
        self._graph.replay(marks)
        return self._logits


class _DecodeGraph(StepGraph):
    """For up to `num_seqs` sequences with up to `query_len` tokens each, all with logits. If `query_len` is 1, each
    sequence has a fixed place; else sequences follow one another, and only the device knows how many tokens each
    has."""

    def __init__(self, capture: _Capture, num_seqs: int, query_len: int) -> None:
        self._size = size = BatchSize(num_seqs, num_seqs * query_len, extensions=capture.state.extensions)
        self._places = num_seqs if query_len == 1 else None
        self._packed = capture.on_device(pack([], [], size, self._places))
        bounds = [query_len] * num_seqs

        def step(marks: SeesLayers | None) -> Tensor:
            return capture.step(self._packed, size, bounds, [], marks)

        self.num_tokens = size.num_tokens
        self._graph, self._logits = capture(step)


class _PromptGraph(StepGraph):
    """For several prompts, whose lengths only the device knows; or, if is_square, for one prompt without earlier
    context, which is treated as if it filled the graph."""

    def __init__(self, capture: _Capture, num_tokens: int, decode_places: int = 0, is_square: bool = False) -> None:
        self._places = decode_places
        num_prompts = 1 if is_square else MAX_PROMPTS
        num_seqs, num_rows = decode_places + num_prompts, decode_places + num_prompts * capture.most_logits
        self._size = size = BatchSize(num_seqs, decode_places + num_tokens, num_rows, capture.state.extensions)
        self.num_tokens = size.num_tokens
        self._packed = capture.on_device(pack([], [], size, decode_places))
        bounds = [1] * decode_places + [num_tokens] * num_prompts
        contexts = [num_tokens] if is_square else []

        def step(marks: SeesLayers | None) -> Tensor:
            return capture.step(self._packed, size, bounds, contexts, marks)

        self._graph, self._logits = capture(step, capture.group_ends)
