"""block_copy as one Triton kernel: a program copies a piece of one block, so that a few large blocks fill the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.block_copy.words import as_words, word_bytes
from baton_kernels.kernel_graph import KernelGraph

PIECE = 2048  # words per program: with 8-byte words, eight 16-byte accesses per thread, all in flight at once
ALIGNMENT = 16
"""Triton compiles a separate kernel for addresses and sizes that are multiples of this."""


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
    """target[target_ids[i]] = source[source_ids[i]]; without ids, row i itself. Row size and strides are not constexpr:
    they depend on how many layers of a block a row holds, and nothing may be compiled while serving."""
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


class Sizes(NamedTuple):
    """The kernel's arguments other than pointers, in its order."""

    row_words: int
    source_stride: int
    target_stride: int
    has_source_ids: bool
    has_target_ids: bool
    piece: int


class Moved(NamedTuple):
    """The kernel that was launched (None in Triton's interpreter, which compiles nothing), its programs per row, and
    its arguments after the addresses."""

    compiled: Any
    num_programs: int
    sizes: Sizes


class PoolMoves:
    """Triton takes tens of microseconds to look up the compiled kernel from a launch's arguments, so this keeps a graph
    of the kernel, by everything that Triton specializes on: sizes and the alignment of addresses."""

    def __init__(self, pool_bytes: Tensor) -> None:
        self._pool = pool_bytes
        self._address = pool_bytes.data_ptr()
        self._on_device = torch.cuda.device_of(pool_bytes)
        self._found: dict[tuple[bool, int, int, int], KernelGraph] = {}

    def ready(
        self,
        gathers: bool,
        block_ids: Tensor,
        num_blocks: int,
        offset: int,
        piece_bytes: int,
        staging: Tensor,
        stream: Any,
    ) -> Callable[[], None]:
        pool_at, staging_at, ids_at = self._address + offset, staging.data_ptr(), block_ids.data_ptr()
        like = (gathers, piece_bytes, pool_at % ALIGNMENT, staging_at % ALIGNMENT)
        places = (pool_at, staging_at) if gathers else (staging_at, pool_at)
        addresses = (*places, ids_at, ids_at)
        if (found := self._found.get(like)) is not None:
            return partial(self._launch, found, addresses, num_blocks, stream.cuda_stream)
        columns = self._pool[:, offset : offset + piece_bytes]
        rows = staging[: num_blocks * piece_bytes].view(num_blocks, piece_bytes)
        source, target = (columns, rows) if gathers else (rows, columns)
        return partial(self._find, like, source, target, block_ids, addresses, num_blocks, stream)

    def _launch(self, graph: KernelGraph, addresses: tuple[int, ...], num_blocks: int, stream: int) -> None:
        with self._on_device:
            graph.launch(addresses, num_blocks, stream)

    def _find(
        self,
        like: tuple[bool, int, int, int],
        source: Tensor,
        target: Tensor,
        block_ids: Tensor,
        addresses: tuple[int, ...],
        num_blocks: int,
        stream: Any,
    ) -> None:
        """Launch the first move of its kind through Triton, and keep a graph of its kernel."""
        source_ids, target_ids = (block_ids, None) if like[0] else (None, block_ids)
        with torch.cuda.stream(stream):
            compiled, num_programs, sizes = _move(source, target, source_ids, target_ids, num_blocks)
        if compiled is None:
            return
        with self._on_device:
            launch = partial(compiled[num_blocks, num_programs, 1], *addresses, *sizes)
            self._found[like] = KernelGraph(
                self._pool.device, lambda captured: launch(stream=captured), num_addresses=len(addresses)
            )


def _move(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_rows: int) -> Moved:
    width = word_bytes(source, target)
    source, target = as_words(source, width), as_words(target, width)
    row_words = source.shape[1]
    num_programs = triton.cdiv(row_words, PIECE)
    has_ids = source_ids is not None, target_ids is not None
    sizes = Sizes(row_words, source.stride(0), target.stride(0), has_ids[0], has_ids[1], PIECE)
    ids = [x for x in (source_ids, target_ids) if x is not None]
    with torch.cuda.device_of(source):  # KV is moved on separate threads, where device 0 is current
        compiled = _move_kernel[num_rows, num_programs](source, target, ids[0], ids[-1], *sizes, num_warps=4)
    return Moved(compiled, num_programs, sizes)
