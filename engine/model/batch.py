"""A step as the model takes it: from chunks of sequences to flat tensors on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch
from baton_kernels.step_inputs import step_inputs
from engine.model.rows import Rows
from engine.sampler import SampleBatch, Sampler
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


def decodes_first(chunks: Seq[Chunk]) -> list[Chunk]:
    """Those with one token before those with more, as PagedBatch wants them."""
    return [c for c in chunks if c.length == 1] + [c for c in chunks if c.length > 1]


def host_token(chunk: Chunk) -> int:
    """The token of a chunk of one; -1 when only the device knows it."""
    tokens = chunk.sequence.tokens
    return tokens[chunk.start] if chunk.start < len(tokens) else -1


def build(chunks: Seq[Chunk], rows: list[int], tables: Rows, sampler: Sampler, block_size: int) -> ModelInputs:
    """Chunks in the order of `decodes_first`, with the rows of their sequences. One copy to the device."""
    device = tables.block_tables.device
    lengths = [chunk.length for chunk in chunks]
    context_lens = [chunk.end for chunk in chunks]
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    num_tokens = int(starts[-1])
    positions = [np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks]
    tokens = itertools.chain.from_iterable(_host_tokens(chunk) for chunk in chunks)
    keep = [int(end) - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.samples_token]
    row, start, context, token_rows, position, host_tokens, kept = _upload_all(
        [
            np.array(rows, dtype=np.int32),
            starts,
            np.array(context_lens, dtype=np.int32),
            np.repeat(np.array(rows, dtype=np.int32), lengths),
            np.concatenate(positions),
            np.fromiter(tokens, dtype=np.int32, count=num_tokens),
            np.array(keep, dtype=np.int32),
        ],
        device,
    )
    ids, slots = step_inputs(token_rows, position, host_tokens, sampler.last_tokens, tables.block_tables, block_size)
    num_decodes = sum(length == 1 for length in lengths)
    paged = PagedBatch(
        block_size, tables.block_tables, row, start, context, num_tokens, num_decodes, lengths, context_lens
    )
    return ModelInputs(ids, position, slots, paged, kept.long())


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


def _upload_all(arrays: list[Int32Array], device: torch.device) -> list[Tensor]:
    """int32 arrays in one copy. Each begins on 16 bytes: Triton compiles a kernel anew for a pointer that does not."""
    ends = np.cumsum([-(-len(array) // 4) * 4 for array in arrays]).tolist()
    packed = np.zeros(ends[-1], dtype=np.int32)
    for array, first in zip(arrays, [0, *ends], strict=False):
        packed[first : first + len(array)] = array
    flat = upload(packed, device)
    return [flat[first : first + len(array)] for array, first in zip(arrays, [0, *ends], strict=False)]


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
