"""The sum of parts that other GPUs have copied here: the middle of an all-reduce by copy engines."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.add_parts import reference


def add_parts(own: Tensor, others: Tensor, copy: Tensor) -> None:
    """Add the rows of `others` to `own`, in their order, in fp32, rounded once; `copy` becomes a copy of the sum.

    own, copy: [n], contiguous. others: [num_others, n], each row contiguous: the parts of the other ranks.
    """
    assert own.dim() == 1
    assert own.shape == copy.shape == others.shape[1:]
    assert own.dtype == copy.dtype == others.dtype
    assert own.is_contiguous()
    assert copy.is_contiguous()
    assert others.stride(1) == 1
    if own.is_cuda:
        from baton_kernels.add_parts import kernel

        kernel.add_parts(own, others, copy)
    else:
        reference.add_parts(own, others, copy)
