"""Matmuls with quantized weights: fp8 and int8 with a scale per row, or per group of columns; 4 bits in groups.

On a GPU, few rows of x are multiplied as they are: a kernel converts the weight's values in registers. For 4 bits in
groups of 128, the order of `arrange` is fastest. For more rows of x, an 8-bit weight with a scale per row, and up to
256 rows one of fp8 in blocks, is multiplied in its own dtype, by x quantized with a scale per row; other weights are
converted to x's dtype, at first in registers, then as a whole, in memory, for cuBLAS. On a CPU, x is never quantized.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.gated_activation import Activation, gated_activation
from baton_kernels.linear.tiling import Tiling
from baton_kernels.quantized_linear import four_bits, reference
from baton_kernels.quantized_linear.four_bits import arrange, can_arrange
from baton_kernels.quantized_linear.tiling import ARRANGED_ROWS, MAX_ROWS, WEIGHT_ONLY_ROWS, choose, choose_four_bits
from baton_kernels.quantized_linear.weights import (
    FourBitWeight,
    QuantizedWeight,
    pack_halves,
    packed_columns,
    unpack_halves,
)
from baton_kernels.unfinished import Scales, unfinished

__all__ = [
    "FourBitWeight",
    "QuantizedRows",
    "QuantizedWeight",
    "activated_linear",
    "arrange",
    "can_arrange",
    "dequantize",
    "gated_linear",
    "linear",
    "pack_halves",
    "packed_columns",
    "quantized_rows",
    "unpack_halves",
    "unscaled_activated_linear",
    "with_quantized_rows",
]


QuantizedRows = tuple[Tensor, Tensor]
"""Rows, [num_rows, n], fp8 or int8, and a scale for each row, [num_rows, 1], fp32."""
_QUANTIZED = "baton_quantized_rows"


def with_quantized_rows(x: Tensor, quantized: QuantizedRows) -> Tensor:
    """Attach x's quantized rows to x, and return x: products that get this very tensor need not quantize it again. A
    kernel that has the rows in registers anyway, such as a norm's, quantizes them more cheaply than one that has to
    read them."""
    setattr(x, _QUANTIZED, quantized)
    return x


def quantized_rows(x: Tensor) -> QuantizedRows | None:
    """The rows that `with_quantized_rows` has attached to x; None: there are none."""
    found: QuantizedRows | None = x.__dict__.get(_QUANTIZED)
    return found


def linear(x: Tensor, weight: QuantizedWeight | FourBitWeight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out_features], of x's dtype.

    x: [..., in_features], the last dimension contiguous. bias: [out_features]. The same shapes give the same bits each
    time; another number of rows may round differently. Calls on one device must run on one stream at a time: they share
    counters.
    """
    assert x.shape[-1] == weight.in_features
    if isinstance(weight, FourBitWeight):
        return _arranged(x, weight, bias, None)
    if not x.is_cuda:
        return reference.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    tiling = _tiling(rows, weight, gated=False)
    return _linear(rows, quantized_rows(x), weight, bias, tiling).view(*x.shape[:-1], -1)


def gated_linear(
    x: Tensor, weight: QuantizedWeight | FourBitWeight, activation: Activation, bias: Tensor | None = None
) -> Tensor:
    """Return `gated_activation(linear(x, weight, bias), activation)`, [..., intermediate_size].

    weight: [2 * intermediate_size, in_features], the gate's rows, then up's.
    """
    assert x.shape[-1] == weight.in_features
    assert weight.out_features % 2 == 0
    if isinstance(weight, FourBitWeight):
        return _arranged(x, weight, bias, activation)
    if not x.is_cuda:
        return reference.gated_linear(x, weight, activation, bias)
    rows = x.reshape(-1, x.shape[-1])
    tiling = _tiling(rows, weight, gated=True)
    if tiling is None:
        out = gated_activation(_linear(rows, quantized_rows(x), weight, bias, None), activation)
    else:
        out = _few_rows(rows, quantized_rows(x), weight, bias, activation, tiling)
    return out.view(*x.shape[:-1], -1)


def activated_linear(
    gate_up: Tensor, activation: Activation, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return `linear(gated_activation(gate_up, activation), weight, bias)`.

    gate_up: [..., 2 * in_features], contiguous. Where the result of the activation is quantized, one kernel does both.
    """
    assert gate_up.shape[-1] == 2 * weight.in_features
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if not gate_up.is_cuda or rows.shape[0] <= WEIGHT_ONLY_ROWS or not weight.by_rows:
        return linear(gated_activation(gate_up, activation), weight, bias)
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    values, scale = quantize_rows(rows, activation, weight.values.dtype)
    return _quantized_product(values, scale, weight, bias, gate_up.dtype).view(*gate_up.shape[:-1], -1)


def unscaled_activated_linear(gate_up: Tensor, activation: Activation, weight: QuantizedWeight, one: Tensor) -> Tensor:
    """`activated_linear` for `rms_norm`, which must be the only reader of the result: the norm applies the scales of up
    to 256 rows (`unfinished`). For Llama 3.1 8B's down with 256 rows, cuBLAS takes 37.4 us with a scale per row and
    27.5 without, and our kernel 29; with more rows, the norm loses what cuBLAS gains.

    gate_up: bf16; in fp16, a sum of unscaled products may be infinite. weight: fp8, with a scale per row. one: a 1 on
    the device, fp32.
    """
    assert gate_up.dtype == torch.bfloat16
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if rows.shape[0] > MAX_ROWS:
        return activated_linear(gate_up, activation, weight)
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    values, scale = quantize_rows(rows, activation, weight.values.dtype)
    product = torch._scaled_mm(values, weight.values.t(), one, one, out_dtype=gate_up.dtype, use_fast_accum=True)
    return unfinished(product.view(*gate_up.shape[:-1], -1), Scales(scale, weight.scale.view(-1)))


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight, [out_features, in_features]; each product of value and scale is rounded to `dtype`."""
    if not weight.values.is_cuda:
        return reference.dequantize(weight, dtype)
    from baton_kernels.quantized_linear.dequantize_kernel import dequantize as kernel

    return kernel(weight, dtype)


def _arranged(x: Tensor, weight: FourBitWeight, bias: Tensor | None, activation: Activation | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.stride(-1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    if 0 < rows.shape[0] <= ARRANGED_ROWS and aligned and x.is_cuda and x.dtype in four_bits.HALVES:
        from baton_kernels.quantized_linear.four_bits_kernel import few_rows

        return few_rows(rows, weight, bias, activation).view(*x.shape[:-1], -1)
    out = F.linear(x, four_bits.dequantize(weight, x.dtype), bias)
    return out if activation is None else gated_activation(out, activation)


def _tiling(x: Tensor, weight: QuantizedWeight, gated: bool) -> Tiling | None:
    chosen = choose_four_bits if weight.four_bits else choose
    depth = weight.packed_columns if weight.four_bits else weight.group
    # Where x takes twice the room, or four times, steps are shorter.
    if _keeps_x(weight) and depth % 64 == 0:
        depth = 64
    elif depth == 256 and weight.four_bits and x.element_size() == 4:
        depth = 128
    return chosen(x.shape[0], weight.out_features, weight.in_features, gated, depth) if x.shape[0] else None


def _linear(
    x: Tensor, quantized: QuantizedRows | None, weight: QuantizedWeight, bias: Tensor | None, tiling: Tiling | None
) -> Tensor:
    if tiling is not None:
        return _few_rows(x, quantized, weight, bias, None, tiling)
    if not weight.by_rows or not x.shape[0]:
        return F.linear(x, dequantize(weight, x.dtype), bias)
    return _quantized_product(*_in_type_of(weight, x, quantized), weight, bias, x.dtype)


def _in_type_of(weight: QuantizedWeight, x: Tensor, quantized: QuantizedRows | None) -> QuantizedRows:
    """x quantized to the weight's dtype. quantized: that result, if it exists already."""
    if quantized is not None and quantized[0].dtype == weight.values.dtype:
        return quantized
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    return quantize_rows(x, None, weight.values.dtype)


def _quantized_product(
    values: Tensor, scale: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of quantized rows: values in the weight's dtype, with a scale per row."""
    if (tiling := _tiling(values, weight, gated=False)) is not None:
        from baton_kernels.quantized_linear import kernel

        return kernel.few_rows(values, scale, weight, bias, None, tiling, dtype)
    if values.dtype == torch.int8:
        out = (torch._int_mm(values, weight.values.t()) * scale * weight.scale.t()).to(dtype)
    else:
        out = torch._scaled_mm(values, weight.values.t(), scale, weight.scale.t(), out_dtype=dtype, use_fast_accum=True)
    return out if bias is None else out + bias


def _few_rows(
    x: Tensor,
    quantized: QuantizedRows | None,
    weight: QuantizedWeight,
    bias: Tensor | None,
    activation: Activation | None,
    tiling: Tiling,
) -> Tensor:
    from baton_kernels.quantized_linear import kernel

    if weight.four_bits or _keeps_x(weight) or x.shape[0] <= WEIGHT_ONLY_ROWS:
        return kernel.few_rows(x, None, weight, bias, activation, tiling, x.dtype)
    values, scale = _in_type_of(weight, x, quantized)
    return kernel.few_rows(values, scale, weight, bias, activation, tiling, x.dtype)


def _keeps_x(weight: QuantizedWeight) -> bool:
    """Whether x is never quantized, however many rows it has: the weight is int8 in groups, or has zero points."""
    in_groups = weight.group > 0 and weight.values.dtype == torch.int8
    return not weight.four_bits and (in_groups or weight.zero is not None)
