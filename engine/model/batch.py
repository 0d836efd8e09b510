"""The model's inputs for a step: from chunks of sequences to flat tensors on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch
from baton_kernels.step_inputs import step_inputs
from engine.model.choices import SampleBatch
from engine.model.extensions import BatchExtension, torch_dtype
from engine.model.processed_logits import ToProcess
from engine.step import Chunk
from engine.token_matcher import TokenMatcher

Int32Array = NDArray[np.int32]
_ON_DEVICE = -1
"""Stands for a token that the host does not know yet, because a launched step samples it."""


class GroupInputs(NamedTuple):
    """What the layers of a KV group read: the batch with the group's block tables, and where they write. slot_mapping:
    [num_tokens] int64."""

    paged: PagedBatch
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a forward reads. input_ids: [num_tokens] int64. positions: [num_tokens] int32. groups: for each KV group.

    keep: [num_rows] int64, the tokens whose logits are wanted; None: all tokens.
    extensions: arguments of the model's forward, by name.
    """

    input_ids: Tensor
    positions: Tensor
    groups: list[GroupInputs]
    keep: Tensor | None
    extensions: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The device's state that all steps share, and the extensions that steps carry. block_tables: [num_groups,
    num_rows, max_blocks] int32. last_tokens: [num_rows] int32."""

    block_tables: Tensor
    last_tokens: Tensor
    block_size: int
    extensions: tuple[BatchExtension, ...] = ()


def singles_first(chunks: Seq[Chunk]) -> list[Chunk]:
    """Chunks of one token before longer ones, as PagedBatch requires: attention has a separate kernel for them."""
    return [c for c in chunks if c.length == 1] + [c for c in chunks if c.length > 1]


def num_singles(chunks: Seq[Chunk]) -> int:
    """How many of the chunks, which are in the order of `singles_first`, have one token."""
    return len(chunks) if chunks and chunks[-1].length == 1 else sum(chunk.length == 1 for chunk in chunks)


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size or the capacity of a batch. num_rows: rows of logits; None: one for each token. extensions: what tokens
    carry besides their ids."""

    num_seqs: int
    num_tokens: int
    num_rows: int | None = None
    extensions: tuple[BatchExtension, ...] = ()

    @classmethod
    def of(cls, chunks: Seq[Chunk], extensions: tuple[BatchExtension, ...] = ()) -> BatchSize:
        return cls(len(chunks), sum(c.length for c in chunks), sum(c.num_logits for c in chunks), extensions)

    @property
    def lengths(self) -> list[int]:
        """The lengths of the arrays of `pack`."""
        carried = [extension.width * self.num_tokens for extension in self.extensions]
        return [self.num_seqs, self.num_seqs + 1, self.num_seqs, *[self.num_tokens] * 3, self.num_rows or 0, *carried]


def pack(chunks: Seq[Chunk], rows: list[int], size: BatchSize, single_places: int | None = None) -> Int32Array:
    """Pack chunks in the order of `singles_first`, with the rows of their sequences, into one array for `unpack`.

    The padding up to `size` consists of sequences without context, tokens without a row, and logits of the first token.
    single_places: how many sequences and tokens at the beginning are reserved for chunks of one token; None: as many as
    needed.
    """
    arrays, packed = _views(size)
    row, start, context, token_rows, positions, host_tokens, keep, *carried = arrays
    n = num_singles(chunks)
    singles, longer, places = chunks[:n], chunks[n:], n if single_places is None else single_places
    row[:n] = rows[:n]
    token_rows[:n], token_rows[n:] = row[:n], -1
    positions[:n] = [chunk.start for chunk in singles]
    context[:n] = positions[:n] + 1
    host_tokens[:n] = [
        tokens[chunk.start] if chunk.start < len(tokens := chunk.sequence.tokens) else _ON_DEVICE for chunk in singles
    ]
    start[: places + 1], start[places + 1 :] = np.arange(places + 1), places
    if longer:
        _pack_longer(longer, rows[n:], places, arrays)
    if size.num_rows:
        singles_kept = [place for place, chunk in enumerate(singles) if chunk.num_logits]
        ends = start[places + 1 : places + 1 + len(longer)].tolist()
        kept = [range(end - chunk.num_logits, end) for chunk, end in zip(longer, ends, strict=True)]
        keep_places = [*singles_kept, *itertools.chain.from_iterable(kept)]
        keep[: len(keep_places)] = keep_places
    for extension, array in zip(size.extensions, carried, strict=True):
        values = array.view(extension.dtype).reshape(-1, extension.width)
        for number, chunk in enumerate(chunks):
            first = start[number if number < n else number - n + places]
            extension.fill(chunk, values[first : first + chunk.length])
    return packed


def _pack_longer(chunks: Seq[Chunk], rows: list[int], first: int, arrays: list[Int32Array]) -> None:
    """Pack the chunks of more than one token. The first of them is sequence `first` of the batch, and begins at token
    `first`."""
    row, start, context, token_rows, positions, host_tokens, *_ = arrays
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    ends = first + np.cumsum(lengths)
    seqs, tokens = slice(first, first + len(chunks)), slice(first, ends[-1])
    row[seqs], context[seqs] = rows, [chunk.end for chunk in chunks]
    start[first + 1 : first + 1 + len(chunks)], start[first + 1 + len(chunks) :] = ends, ends[-1]
    token_rows[tokens] = np.repeat(row[seqs], lengths)
    # A token's position is its index in the batch plus an offset, the same for all tokens of a chunk.
    positions[tokens] = np.arange(first, ends[-1]) + np.repeat(context[seqs] - ends, lengths)
    host_tokens[tokens] = np.concatenate([*map(_host_tokens, chunks)])


def _host_tokens(chunk: Chunk) -> Int32Array:
    tokens = np.full(chunk.length, _ON_DEVICE, np.int32)
    known = chunk.sequence.tokens[chunk.start : chunk.end]
    tokens[: len(known)] = known
    tokens[len(known) : len(known) + len(chunk.draft_tokens)] = chunk.draft_tokens
    return tokens


def unpack(
    packed: Tensor, size: BatchSize, state: DeviceState, query_lens: list[int], context_lens: list[int]
) -> ModelInputs:
    """The inputs from the array of `pack`, once it is on the device. query_lens, context_lens: as in PagedBatch."""
    row, start, context, token_rows, positions, host_tokens, keep, *carried = _cut(packed, size)
    num_decodes = sum(1 for _ in itertools.takewhile(lambda length: length == 1, query_lens))
    groups = list[GroupInputs]()
    for tables in state.block_tables:
        ids, slots = step_inputs(token_rows, positions, host_tokens, state.last_tokens, tables, state.block_size)
        paged = PagedBatch(
            state.block_size,
            tables,
            row,
            start,
            context,
            size.num_tokens,
            num_decodes=num_decodes,
            query_lens=query_lens,
            host_context_lens=context_lens,
        )
        groups.append(GroupInputs(paged, slots))
    extensions = {
        extension.name: extension.argument(array.view(torch_dtype(extension)).view(-1, extension.width))
        for extension, array in zip(size.extensions, carried, strict=True)
    }
    return ModelInputs(ids, positions, groups, None if size.num_rows is None else keep.long(), extensions)


def sample_batch(chunks: Seq[Chunk], rows: list[int]) -> SampleBatch:
    """The choices to make from the chunks' logits, which are in the order of the chunks: for each row of logits, one
    choice per sample of the sequence, with the position of the token to choose."""
    logits_rows, own, samples, positions = list[int](), list[int](), list[int](), list[int]()
    tokens = list[Seq[int]]()
    matchers = list[tuple[int, TokenMatcher]]()
    to_process = list[ToProcess]()
    num_logits = 0
    for chunk, row in zip(chunks, rows, strict=True):
        position, of_sequence = chunk.start + chunk.length - chunk.num_logits, chunk.sequence.samples
        for logits_row in range(num_logits, num_logits + chunk.num_logits):
            position += 1
            if (matcher := chunk.sequence.matcher) is not None:
                matchers += [(len(own) + index, matcher) for index in range(len(of_sequence))]
            if (chain := chunk.sequence.processors) is not None:
                known = chain, chunk.sequence.prompt_tokens, chunk.sequence.output_tokens
                to_process += [ToProcess(len(own) + index, *known) for index in range(len(of_sequence))]
            for sample in of_sequence:
                logits_rows.append(logits_row)
                own.append(row)
                samples.append(sample)
                positions.append(position)
                tokens.append(chunk.sequence.tokens)
        num_logits += chunk.num_logits
    return SampleBatch(logits_rows, own, samples, positions, tokens, matchers, to_process)


def _starts(size: BatchSize) -> list[int]:
    """Where each array of `pack` begins, and where the last one ends. All are aligned to 16 bytes, because Triton
    compiles a kernel again for an unaligned pointer."""
    return [0, *itertools.accumulate(-(-length // 4) * 4 for length in size.lengths)]


def _views(size: BatchSize) -> tuple[list[Int32Array], Int32Array]:
    starts = _starts(size)
    packed = np.zeros(starts[-1], dtype=np.int32)
    return [packed[first : first + n] for first, n in zip(starts, size.lengths, strict=False)], packed


def _cut(packed: Tensor, size: BatchSize) -> list[Tensor]:
    return [packed[first : first + n] for first, n in zip(_starts(size), size.lengths, strict=False)]
