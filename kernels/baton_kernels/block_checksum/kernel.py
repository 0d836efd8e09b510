"""block_checksum as one Triton kernel: a program sums a piece of one row and adds it to the row's checksum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.block_checksum.reference import MIX, STEP

PIECE = 4096  # words per program


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "ids_ptr"])
def _checksum_kernel(
    rows_ptr,
    ids_ptr,
    sums_ptr,
    row_words,
    row_stride,
    HAS_IDS: tl.constexpr,
    STEP: tl.constexpr,
    MIX: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_IDS:
        source = tl.load(ids_ptr + row)
    word = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = word < row_words
    x = tl.load(rows_ptr + source * row_stride + word, mask=mask, other=0)
    x = x ^ ((word + 1).to(tl.int64) * STEP)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX
    x = x ^ ((x >> 27) & ((1 << 37) - 1))
    tl.atomic_add(sums_ptr + row, tl.sum(tl.where(mask, x, 0), axis=0))


def block_checksums(rows: Tensor, block_ids: Tensor | None) -> Tensor:
    words = rows.view(torch.int64)
    num_rows = rows.shape[0] if block_ids is None else block_ids.shape[0]
    sums = torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
    row_words = words.shape[1]
    with torch.cuda.device_of(rows):
        _checksum_kernel[(num_rows, triton.cdiv(row_words, PIECE))](
            words,
            words if block_ids is None else block_ids,
            sums,
            row_words,
            words.stride(0),
            block_ids is not None,
            STEP,
            MIX,
            PIECE,
            num_warps=4,
        )
    return sums
