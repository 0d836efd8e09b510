"""An all-reduce, the residual addition and the RMS norm after it, as one kernel.

Without the fusion, each sum of a decode step is a kernel that copies the parts into memory that all ranks map, waits
for all ranks, sums, and waits again; the norm is another kernel. Here a rank writes its part straight into the memory
of those that sum it, and the part itself shows that it has arrived: there is no barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.all_reduce_rms_norm import reference
from baton_kernels.quantized_linear import with_quantized_rows
from baton_kernels.quantized_linear.tiling import WEIGHT_ONLY_ROWS

NUM_PROGRAMS = 128
"""The most programs of a launch."""
REGION_BYTES = 64 * 1024
"""A program's room for the rows that one other rank sends to it in a call."""
RECEIVED_BYTES = 8 * 1024 * 1024
"""The most bytes that a rank receives in a call."""
EMPTY = -1
"""The bits of an element that has not arrived, all ones in any dtype: a NaN that no rank sends."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Buffers through which ranks exchange their parts of sums: one of `num_bytes` for each rank, mapped by all ranks.
    All bytes must be 0xFF before any rank makes the first call. The caller owns the buffers, and keeps them while this
    is used.

    addresses: [size] int64, where this rank's GPU maps each rank's buffer. turns: [NUM_PROGRAMS] int32, zeros at first:
    which half of its regions a program uses next. num_programs: the most programs of a launch, the same on all ranks:
    every GPU must run them all at once, since a program waits for those with its number on the other ranks.
    """

    rank: int
    size: int
    addresses: Tensor
    turns: Tensor
    num_programs: int = NUM_PROGRAMS

    @staticmethod
    def num_bytes(size: int) -> int:
        """The size of each rank's buffer."""
        return 2 * (size - 1) * NUM_PROGRAMS * REGION_BYTES

    def can_take(self, num_rows: int, row_bytes: int) -> bool:
        if row_bytes % 16 or row_bytes > REGION_BYTES:
            return False
        share = self.share_bytes(row_bytes)
        received = (self.size - 1) * num_rows * (row_bytes if share == row_bytes else 2 * share)
        return received <= RECEIVED_BYTES and num_rows <= self.num_programs * (REGION_BYTES // row_bytes)

    def share_bytes(self, row_bytes: int) -> int:
        """How much of each row a rank sums: all of it (one shot), between two ranks, where that sends as many bytes;
        among more, its share, whose sum it sends to the others (two shots). The last ranks may have less. A multiple
        of 16."""
        if self.size == 2 or row_bytes < 16 * self.size:
            return row_bytes
        return -(-row_bytes // (16 * self.size)) * 16


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    all_reduce: Callable[[Tensor], Tensor],
    peers: PeerMemory | None,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
    quantize: torch.dtype | None = None,
) -> Tensor:
    """Return `rms_norm` of the sum of x over all ranks; the other arguments are those of `rms_norm`. All ranks must
    make the same call. They get the same bits: each adds the parts in the same order, in fp32, and rounds to x's dtype.

    x: [..., n], contiguous: this rank's part, which may be overwritten. residual: the same on all ranks.
    all_reduce: computes the sum over all ranks if `peers` is None, as on a CPU.
    peers: used by one call at a time, on one stream or on streams that wait for each other; must be able to take x.
        Works in CUDA graphs.
    """
    if peers is None:
        return reference.all_reduce_rms_norm(x, weight, eps, all_reduce, residual, weight_offset, round_once, quantize)
    n = weight.shape[0]
    round_once = round_once or weight_offset != 0.0
    assert x.shape[-1] == n
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert round_once or weight.dtype == x.dtype
    num_rows = x.numel() // n
    assert peers.can_take(num_rows, n * x.itemsize)
    if residual is not None:
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        assert residual.is_contiguous()
    from baton_kernels.all_reduce_rms_norm import kernel

    if quantize is None or num_rows <= WEIGHT_ONLY_ROWS:
        return kernel.all_reduce_rms_norm(x, weight, eps, peers, residual, weight_offset, round_once)
    values = torch.empty((num_rows, n), dtype=quantize, device=x.device)
    quantized = values, torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    out = kernel.all_reduce_rms_norm(x, weight, eps, peers, residual, weight_offset, round_once, quantized)
    return with_quantized_rows(out, quantized)
