"""reduce_rms_norm and wait_for_flags as Triton kernels.

Flags are read with volatile loads, which see what other GPUs write. A flag is copied after the rows, in the same queue,
so rows that are read after it have arrived.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.reduce_rms_norm import Parts
from baton_kernels.rms_norm.kernel import normed


@triton.jit
def _until_set(flag_ptr, NUMBER: tl.constexpr):
    for index in tl.static_range(NUMBER):
        flag = tl.load(flag_ptr + index, volatile=True)
        while flag == 0:
            flag = tl.load(flag_ptr + index, volatile=True)


@triton.jit(do_not_specialize=["received_stride"], do_not_specialize_on_alignment=["arrived_ptr"])
def _reduce_rms_norm_kernel(
    own_ptr,
    received_ptr,
    arrived_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    received_stride,
    eps,
    weight_offset,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
):
    """One row per program."""
    DTYPE: tl.constexpr = own_ptr.dtype.element_ty
    column = tl.arange(0, N_PADDED)[None, :]
    mask = column < N
    offset = tl.program_id(0).to(tl.int64) * N + column
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + weight_offset
    own = tl.load(own_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    _until_set(arrived_ptr, SIZE - 1)
    tl.debug_barrier()  # no thread reads rows before all have seen the flags
    x = tl.zeros([1, N_PADDED], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            x += own
        else:
            place = ((rank - RANK + SIZE) % SIZE - 1) * tl.cast(received_stride, tl.int64)
            x += tl.load(received_ptr + place + offset, mask=mask, other=0.0, volatile=True).to(tl.float32)
    rounded = x.to(DTYPE)
    if HAS_RESIDUAL:
        rounded = (rounded.to(tl.float32) + residual).to(DTYPE)
        tl.store(residual_ptr + offset, rounded, mask=mask)
    x = rounded.to(tl.float32)
    out = normed(x, tl.sum(x * x, axis=1, keep_dims=True), weight, eps, N, ROUND_ONCE, DTYPE)
    tl.store(out_ptr + offset, out, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "second_ptr"])
def _wait_for_flags_kernel(first_ptr, second_ptr, NUMBER: tl.constexpr):
    _until_set(first_ptr, NUMBER)
    _until_set(second_ptr, NUMBER)
    tl.debug_barrier()
    for index in tl.static_range(NUMBER):
        tl.store(first_ptr + index, 0)
        tl.store(second_ptr + index, 0)


def reduce_rms_norm(
    parts: Parts,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None,
    weight_offset: float,
    round_once: bool,
) -> None:
    num_rows, n = out.shape
    padded = triton.next_power_of_2(n)
    _reduce_rms_norm_kernel[(num_rows,)](
        parts.own,
        parts.received,
        parts.arrived,
        parts.own if residual is None else residual,
        weight,
        out,
        parts.received.stride(0),
        eps,
        weight_offset,
        n,
        padded,
        parts.rank,
        len(parts.received) + 1,
        residual is not None,
        round_once,
        num_warps=max(1, min(16, padded // 512)),
    )


def wait_for_flags(first: Tensor, second: Tensor) -> None:
    _wait_for_flags_kernel[(1,)](first, second, len(first), num_warps=1)
