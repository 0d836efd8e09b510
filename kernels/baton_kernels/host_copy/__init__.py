"""Copies small arrays between a GPU and pinned host memory with a kernel that accesses that memory directly.

A copy engine could do this, but switching between copies and kernels costs a GPU about 10 us, and a step makes several
copies.
"""

from __future__ import annotations

from torch import Tensor

from baton_kernels.host_copy import reference


def host_copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out` on the current stream, without waiting for it.

    Both are contiguous, of the same dtype and number of elements. One of them may be pinned host memory; its owner must
    keep it until the stream has passed this point.
    """
    assert source.dtype == out.dtype
    assert source.numel() == out.numel()
    assert source.is_contiguous()
    assert out.is_contiguous()
    if source.is_cuda or out.is_cuda:
        from baton_kernels.host_copy import kernel

        kernel.host_copy(source, out)
    else:
        reference.host_copy(source, out)
