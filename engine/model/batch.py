"""A step as the model takes it: from chunks of sequences to flat tensors on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch
from baton_kernels.step_inputs import step_inputs
from engine.sampler import SampleBatch
from engine.step import Chunk
from engine.upload import upload

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a forward reads. input_ids, slot_mapping: [num_tokens] int64. positions: [num_tokens] int32.

    keep: [num_rows] int64, the tokens whose logits are wanted; None: those of all.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    paged: PagedBatch
    keep: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What steps find on the device. block_tables: [num_rows, max_blocks] int32. last_tokens: [num_rows] int32."""

    block_tables: Tensor
    last_tokens: Tensor
    block_size: int


def decodes_first(chunks: Seq[Chunk]) -> list[Chunk]:
    """Those with one token before those with more, as PagedBatch wants them."""
    return [c for c in chunks if c.length == 1] + [c for c in chunks if c.length > 1]


def build(chunks: Seq[Chunk], rows: list[int], state: DeviceState) -> ModelInputs:
    """Chunks in the order of `decodes_first`, by one copy to the device."""
    size = BatchSize.of(chunks)
    packed = upload(pack(chunks, rows, size), state.block_tables.device)
    return unpack(packed, size, state, [chunk.length for chunk in chunks], [chunk.end for chunk in chunks])


def host_token(chunk: Chunk) -> int:
    """The token of a chunk of one; -1 when only the device knows it."""
    tokens = chunk.sequence.tokens
    return tokens[chunk.start] if chunk.start < len(tokens) else -1


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a batch has, or has room for: `num_rows` of logits."""

    num_seqs: int
    num_tokens: int
    num_rows: int

    @classmethod
    def of(cls, chunks: Seq[Chunk]) -> BatchSize:
        return cls(len(chunks), sum(c.length for c in chunks), sum(c.samples_token for c in chunks))

    @property
    def lengths(self) -> list[int]:
        """Of the arrays of `pack`."""
        return [self.num_seqs, self.num_seqs + 1, self.num_seqs, *[self.num_tokens] * 3, self.num_rows]


def pack(chunks: Seq[Chunk], rows: list[int], size: BatchSize, decode_places: int = 0) -> Int32Array:
    """Chunks in the order of `decodes_first`, with the rows of their sequences, as one array for `unpack`.

    What pads them to `size` are sequences without tokens, tokens without a row, and logits of the first token.
    decode_places: so many sequences and tokens at the beginning are for chunks of one token, as many as there are.
    """
    arrays, packed = _views(size)
    row, start, context, token_rows, positions, host_tokens, keep = arrays
    token_rows[:] = -1
    num_decodes = sum(chunk.length == 1 for chunk in chunks) if decode_places else 0
    num_kept = 0
    for first, group, own in (
        (0, chunks[:num_decodes], rows[:num_decodes]),
        (decode_places, chunks[num_decodes:], rows[num_decodes:]),
    ):
        lengths = [chunk.length for chunk in group]
        ends = list(itertools.accumulate(lengths, initial=first))[1:]
        seqs, end = slice(first, first + len(group)), ends[-1] if ends else first
        row[seqs], context[seqs] = own, [chunk.end for chunk in group]
        start[first + 1 : first + 1 + len(group)], start[first + 1 + len(group) :] = ends, end
        if group:
            token_rows[first:end] = np.repeat(row[seqs], lengths)
            pieces = [np.arange(c.start, c.end, dtype=np.int32) for c in group]
            np.concatenate(pieces, out=positions[first:end])
        tokens = itertools.chain.from_iterable(_host_tokens(chunk) for chunk in group)
        host_tokens[first:end] = np.fromiter(tokens, dtype=np.int32, count=end - first)
        last = [after - 1 for chunk, after in zip(group, ends, strict=True) if chunk.samples_token]
        keep[num_kept : num_kept + len(last)] = last
        num_kept += len(last)
    start[: decode_places + 1] = np.arange(decode_places + 1)
    return packed


def unpack(
    packed: Tensor, size: BatchSize, state: DeviceState, query_lens: list[int], context_lens: list[int]
) -> ModelInputs:
    """What `pack` made, once it is on the device. query_lens, context_lens: as in PagedBatch."""
    row, start, context, token_rows, positions, host_tokens, keep = _cut(packed, size)
    ids, slots = step_inputs(
        token_rows, positions, host_tokens, state.last_tokens, state.block_tables, state.block_size
    )
    num_decodes = sum(1 for _ in itertools.takewhile(lambda length: length == 1, query_lens))
    paged = PagedBatch(
        state.block_size,
        state.block_tables,
        row,
        start,
        context,
        size.num_tokens,
        num_decodes,
        query_lens,
        context_lens,
    )
    return ModelInputs(ids, positions, slots, paged, keep.long())


def sample_batch(chunks: Seq[Chunk], rows: list[int]) -> SampleBatch:
    """The choices of the chunks that sample, whose logits are in their order: one for each sample of a sequence."""
    logits_rows, own, samples, positions = list[int](), list[int](), list[int](), list[int]()
    sampling = [(chunk, row) for chunk, row in zip(chunks, rows, strict=True) if chunk.samples_token]
    for number, (chunk, row) in enumerate(sampling):
        for sample in chunk.sequence.samples:
            logits_rows.append(number)
            own.append(row)
            samples.append(sample)
            positions.append(chunk.end)
    return SampleBatch(logits_rows, own, samples, positions)


def _starts(size: BatchSize) -> list[int]:
    """Where each array of `pack` begins, and the end: on 16 bytes, as Triton compiles a kernel anew for a pointer that
    is not."""
    return [0, *itertools.accumulate(-(-length // 4) * 4 for length in size.lengths)]


def _views(size: BatchSize) -> tuple[list[Int32Array], Int32Array]:
    starts = _starts(size)
    packed = np.zeros(starts[-1], dtype=np.int32)
    return [packed[first : first + n] for first, n in zip(starts, size.lengths, strict=False)], packed


def _cut(packed: Tensor, size: BatchSize) -> list[Tensor]:
    return [packed[first : first + n] for first, n in zip(_starts(size), size.lengths, strict=False)]


def _host_tokens(chunk: Chunk) -> Seq[int]:
    if chunk.length == 1:
        return (host_token(chunk),)
    known = chunk.sequence.tokens[chunk.start : chunk.end]
    return known if len(known) == chunk.length else [*known, -1]


def decode_inputs(chunks: Seq[Chunk], rows: list[int], size: int) -> Int32Array:
    """[4, size]: rows, positions, host tokens and context lengths of chunks of one token; padded with row -1."""
    packed = np.zeros((4, size), dtype=np.int32)
    n = len(chunks)
    packed[0, :n], packed[0, n:] = rows, -1
    packed[1, :n] = [chunk.start for chunk in chunks]
    packed[2, :n] = [host_token(chunk) for chunk in chunks]
    packed[3, :n] = packed[1, :n] + 1
    return packed
