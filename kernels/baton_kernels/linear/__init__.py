"""Matmuls with a model's weights, for the few rows of a decode step and the many rows of a prefill.

On Hopper GPUs, matmuls of up to 128 rows, and gated ones of any number, may run in Triton kernels: `tiling.py` lists
the shapes for which they measured faster than cuBLAS. The kernels for few rows also take part in programmatic dependent
launch (`baton_kernels.pdl`); cuBLAS's do not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton_kernels.gated_activation import Activation
from baton_kernels.linear import reference
from baton_kernels.linear.tiling import KERNEL_ROWS, AnyTiling, RowTiling, Tiling, WideTiling, choose

__all__ = ["KERNEL_ROWS", "gated_linear", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out_features].

    x: [..., in_features]. weight: [out_features, in_features], rows contiguous, as in nn.Linear. bias: [out_features].
    The same shapes give the same bits each time, in a CUDA graph or not; another number of rows may round differently.
    Calls on one device must run on one stream at a time: they share counters.
    """
    assert x.shape[-1] == weight.shape[1]
    tiling = _tiling(x, weight, gated=False)
    if not isinstance(tiling, RowTiling | Tiling):
        return reference.linear(x, weight, bias)
    from baton_kernels.linear import kernel

    out = kernel.few_rows(x.reshape(-1, x.shape[-1]), weight, bias, None, tiling)
    return out.view(*x.shape[:-1], -1)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Return `gated_activation(linear(x, weight, bias), activation)`, [..., intermediate_size], with the same rounding.

    x: [..., in_features]. weight: [2 * intermediate_size, in_features], the gate's rows, then up's.
    """
    assert x.shape[-1] == weight.shape[1]
    assert weight.shape[0] % 2 == 0
    tiling = _tiling(x, weight, gated=True)
    if isinstance(tiling, RowTiling | Tiling):
        from baton_kernels.linear import kernel

        rows = x.reshape(-1, x.shape[-1])
        return kernel.few_rows(rows, weight, bias, activation, tiling).view(*x.shape[:-1], -1)
    if isinstance(tiling, WideTiling) and bias is None:
        from baton_kernels.linear import many_rows

        rows = x.reshape(-1, x.shape[-1])
        if many_rows.can_take(rows, weight):
            out = many_rows.many_rows(rows, weight, activation, tiling, _num_sms(x.device))
            return out.view(*x.shape[:-1], -1)
    return reference.gated_linear(x, weight, activation, bias)


def _tiling(x: Tensor, weight: Tensor, gated: bool) -> AnyTiling | None:
    """The Triton kernel and tiling to use; None: cuBLAS or the CPU."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    num_rows = x.numel() // x.shape[-1]
    if not num_rows or weight.dtype != x.dtype or x.stride(-1) != 1 or weight.stride(1) != 1:
        return None
    num_sms = _num_sms(x.device)
    return choose(num_rows, *weight.shape, gated, num_sms) if num_sms else None


@functools.cache
def _num_sms(device: torch.device) -> int:
    """The number of SMs of a Hopper GPU; 0 for any other GPU, since nothing was measured there."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0
