"""The RMS norm of rows whose parts other ranks have sent, and the wait for rows that they normed.

For sequence parallelism: of a prompt's rows, each rank sums and norms some, and gets the others' from their owners.
Copy engines carry the rows, and after them a flag, so no kernel occupies SMs for the transfer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from baton_kernels.reduce_rms_norm import reference


class Parts(NamedTuple):
    """The parts of a sum of rows. own: [num_rows, n], this rank's part, contiguous. received: [size - 1, num_rows, n],
    those of ranks rank + 1, rank + 2, ... modulo size; rows and columns contiguous. arrived: [size - 1] int32, from
    when on they are not 0, the parts are there."""

    own: Tensor
    received: Tensor
    arrived: Tensor
    rank: int


def reduce_rms_norm(
    parts: Parts,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> None:
    """Wait until all parts have arrived, and write `rms_norm` of their sum to `out`, [num_rows, n], contiguous, of at
    least one row; the other arguments are those of `rms_norm`. Parts are added in the order of ranks, in fp32, and the
    sum is rounded to their dtype. On a GPU, the kernel waits; what sends the parts must not need its SMs.
    """
    round_once = round_once or weight_offset != 0.0
    assert len(out), "without rows, no program would wait for the parts"
    assert out.shape == parts.own.shape
    assert parts.received.shape == (len(parts.arrived), *out.shape)
    assert parts.own.is_contiguous()
    assert parts.received.stride()[1:] == out.stride()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert round_once or weight.dtype == out.dtype
    if residual is not None:
        assert residual.shape == out.shape
        assert residual.dtype == out.dtype
        assert residual.is_contiguous()
    if not out.is_cuda:
        reference.reduce_rms_norm(parts, weight, eps, out, residual, weight_offset, round_once)
        return
    from baton_kernels.reduce_rms_norm import kernel

    kernel.reduce_rms_norm(parts, weight, eps, out, residual, weight_offset, round_once)


def wait_for_flags(first: Tensor, second: Tensor) -> None:
    """Wait until no element of either is 0, and set them to 0. Each: [n] int32, contiguous, the same n."""
    assert first.shape == second.shape
    assert first.is_contiguous()
    assert second.is_contiguous()
    if not first.is_cuda:
        reference.wait_for_flags(first, second)
        return
    from baton_kernels.reduce_rms_norm import kernel

    kernel.wait_for_flags(first, second)
