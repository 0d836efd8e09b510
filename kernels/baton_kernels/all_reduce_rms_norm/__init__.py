"""The sum over ranks of each one's part, the residual addition and the RMS norm after it, as one kernel.

Without the fusion each of a decode step's sums is a kernel that copies the parts into memory that all ranks map, waits
for all ranks, sums, and waits again; the norm is another. Here a rank writes its part straight into the memory of the
others, and the part itself tells that it has arrived: there is no barrier.
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
"""Programs of a launch at most."""
REGION_BYTES = 64 * 1024
"""What a program has for rows that one other rank sends to it in a call."""
RECEIVED_BYTES = 8 * 1024 * 1024
"""The most that a rank is sent in a call: every part as a whole, so that more ranks can sum fewer rows."""
EMPTY = -1
"""The bits of an element that has not arrived, in any dtype all ones: a NaN that no rank sends."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Buffers of `num_bytes` that all ranks map, through which parts of sums go; one for each rank, of which all bytes
    are 0xFF before any rank makes the first call. The caller owns them, and keeps them while this is used.

    addresses: [size] int64, where this rank's GPU maps each rank's buffer. turns: [NUM_PROGRAMS] int32, zeros at first:
    which half of its regions a program uses next. num_programs: of a launch at most, on all ranks: as many as each GPU
    runs at once, since every program waits for those of its number on the other ranks.
    """

    rank: int
    size: int
    addresses: Tensor
    turns: Tensor
    num_programs: int = NUM_PROGRAMS

    @staticmethod
    def num_bytes(size: int) -> int:
        """Of each rank's buffer."""
        return 2 * (size - 1) * NUM_PROGRAMS * REGION_BYTES

    def can_take(self, num_rows: int, row_bytes: int) -> bool:
        if row_bytes % 16 or row_bytes > REGION_BYTES:
            return False
        fits = num_rows <= self.num_programs * (REGION_BYTES // row_bytes)
        return fits and (self.size - 1) * num_rows * row_bytes <= RECEIVED_BYTES


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
    """Return `rms_norm` of the sum over all ranks of x, with the arguments of that; all ranks must call it alike, and
    get the same bits: they add the parts in the order of the ranks, in fp32, and round to x's dtype.

    x: [..., n], contiguous: this rank's part, which may be overwritten. residual: the same on all ranks.
    all_reduce: the sum over all ranks, where `peers` is None, as on a CPU.
    peers: used by one call at a time, of the same stream or of streams that wait for each other; must be able to take
        x. Works in CUDA graphs.
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
