"""add_parts as a Triton kernel. It runs beside matmuls, so its programs are short: each frees its SM soon."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launcher import Launcher

TILE = 4096
"""Elements of a program: with 8 warps, two 16-byte accesses of each tensor per thread."""


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["n"])
def _add_parts_kernel(own_ptr, others_ptr, copy_ptr, n, stride, NUM_OTHERS: tl.constexpr, TILE: tl.constexpr):
    """stride: between others' rows, in units of 16 elements."""
    offset = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offset < n
    total = tl.load(own_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for other in tl.static_range(NUM_OTHERS):
        row_ptr = others_ptr + tl.cast(stride, tl.int64) * (16 * other)
        total += tl.load(row_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(own_ptr.dtype.element_ty)
    tl.store(own_ptr + offset, rounded, mask=mask)
    tl.store(copy_ptr + offset, rounded, mask=mask)


_launch = Launcher(_add_parts_kernel, num_warps=8)


def add_parts(own: Tensor, others: Tensor, copy: Tensor) -> None:
    n = own.shape[0]
    if n == 0:
        return
    stride, rest = divmod(others.stride(0), 16)
    assert not rest
    like = own.dtype, others.shape[0], *(x.data_ptr() % 16 == 0 for x in (own, others, copy))
    _launch(like, (triton.cdiv(n, TILE), 1, 1), own, others, copy, n, stride, others.shape[0], TILE)
