"""Matmuls with quantized weights: fp8 and int8 with a scale per row, or per group of columns; 4 bits in groups.

On a GPU, few rows of x are multiplied as they are, by values that a kernel converts in registers. For more rows of x, a
weight with 8 bits and a scale per row is multiplied in its own type, by x quantized with a scale per row; other weights
are converted to x's dtype as a whole, in memory, and left to cuBLAS. On a CPU, x is never quantized.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.gated_activation import Activation, gated_activation
from baton_kernels.linear.tiling import Tiling
from baton_kernels.quantized_linear import reference
from baton_kernels.quantized_linear.tiling import WEIGHT_ONLY_ROWS, choose, choose_four_bits
from baton_kernels.quantized_linear.weights import QuantizedWeight, pack_halves, packed_columns, unpack_halves

__all__ = [
    "QuantizedWeight",
    "dequantize",
    "gated_linear",
    "linear",
    "pack_halves",
    "packed_columns",
    "unpack_halves",
]


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out_features], of x's dtype.

    x: [..., in_features], the last dimension contiguous. bias: [out_features]. The same shapes give the same bits each
    time; another number of rows may round differently. Calls on one device must run on one stream at a time: they share
    counters.
    """
    assert x.shape[-1] == weight.in_features
    if not x.is_cuda:
        return reference.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    tiling = _tiling(rows, weight, gated=False)
    return _linear(rows, weight, bias, tiling).view(*x.shape[:-1], -1)


def gated_linear(x: Tensor, weight: QuantizedWeight, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """Return `gated_activation(linear(x, weight, bias), activation)`, [..., intermediate_size].

    weight: [2 * intermediate_size, in_features], the gate's rows, then up's.
    """
    assert x.shape[-1] == weight.in_features
    assert weight.out_features % 2 == 0
    if not x.is_cuda:
        return reference.gated_linear(x, weight, activation, bias)
    rows = x.reshape(-1, x.shape[-1])
    tiling = _tiling(rows, weight, gated=True)
    if tiling is None:
        out = gated_activation(_linear(rows, weight, bias, None), activation)
    else:
        out = _few_rows(rows, weight, bias, activation, tiling)
    return out.view(*x.shape[:-1], -1)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features]: what the weight stands for, each product of value and scale rounded to `dtype`."""
    if not weight.values.is_cuda:
        return reference.dequantize(weight, dtype)
    from baton_kernels.quantized_linear.dequantize_kernel import dequantize as kernel

    return kernel(weight, dtype)


def _tiling(x: Tensor, weight: QuantizedWeight, gated: bool) -> Tiling | None:
    chosen = choose_four_bits if weight.four_bits else choose
    depth = weight.packed_columns if weight.four_bits else weight.group
    return chosen(x.shape[0], weight.out_features, weight.in_features, gated, depth) if x.shape[0] else None


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tiling: Tiling | None) -> Tensor:
    if tiling is not None:
        return _few_rows(x, weight, bias, None, tiling)
    if weight.four_bits or weight.group or weight.scale_rows > 1 or not x.shape[0]:
        return F.linear(x, dequantize(weight, x.dtype), bias)
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    values, scale = quantize_rows(x, None, weight.values.dtype)
    if values.dtype == torch.int8:
        out = (torch._int_mm(values, weight.values.t()) * scale * weight.scale.t()).to(x.dtype)
    else:
        out = torch._scaled_mm(
            values, weight.values.t(), scale, weight.scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )
    return out if bias is None else out + bias


def _few_rows(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: Activation | None, tiling: Tiling
) -> Tensor:
    from baton_kernels.quantized_linear import kernel
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    if weight.four_bits or x.shape[0] <= WEIGHT_ONLY_ROWS:
        return kernel.few_rows(x, None, weight, bias, activation, tiling, x.dtype)
    values, scale = quantize_rows(x, None, weight.values.dtype)
    return kernel.few_rows(values, scale, weight, bias, activation, tiling, x.dtype)
