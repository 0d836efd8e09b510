"""block_copy as one Triton kernel: a program moves a piece of one block, so that few large blocks fill the GPU too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.block_copy.words import as_words, word_bytes

PIECE = 2048  # words per program: with 8-byte words eight 16-byte accesses per thread, all under way at once


@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"])
def _move_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    row_words,
    source_stride,
    target_stride,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """target[target_ids[i]] = source[source_ids[i]]; without ids, row i itself. Words of a row, and between rows, are
    no constants: how many layers a row has of its block differs, and nothing may be compiled while serving."""
    source = tl.program_id(0).to(tl.int64)
    target = source
    if HAS_TARGET_IDS:
        target = tl.load(target_ids_ptr + source)
    if HAS_SOURCE_IDS:
        source = tl.load(source_ids_ptr + source)
    word = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = word < row_words
    values = tl.load(source_ptr + source * source_stride + word, mask=mask)
    tl.store(target_ptr + target * target_stride + word, values, mask=mask)


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    rows = pool.view(torch.uint8).view(pool.shape[0], -1)
    _move(rows, rows, sources, destinations, sources.shape[0])


def gather_blocks(pool_bytes: Tensor, block_ids: Tensor, out: Tensor) -> None:
    _move(pool_bytes, out, block_ids, None, block_ids.shape[0])


def scatter_blocks(src: Tensor, pool_bytes: Tensor, block_ids: Tensor) -> None:
    _move(src, pool_bytes, None, block_ids, block_ids.shape[0])


def _move(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_rows: int) -> None:
    width = word_bytes(source, target)
    source, target = as_words(source, width), as_words(target, width)
    row_words = source.shape[1]
    with torch.cuda.device_of(source):  # those who move KV have threads of their own, whose device is the first
        _move_kernel[(num_rows, triton.cdiv(row_words, PIECE))](
            source,
            target,
            source if source_ids is None else source_ids,
            target if target_ids is None else target_ids,
            row_words,
            source.stride(0),
            target.stride(0),
            source_ids is not None,
            target_ids is not None,
            PIECE,
            num_warps=4,
        )
