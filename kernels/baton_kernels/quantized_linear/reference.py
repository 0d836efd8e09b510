"""Products with quantized weights in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.gated_activation import Activation, gated_activation
from baton_kernels.quantized_linear.weights import LARGEST, QuantizedWeight, unpack_halves


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    # Scaling the sums by rows saves a pass over the weight in fp32. In fp16, unscaled sums may be infinite.
    if weight.by_rows and x.dtype == torch.bfloat16:
        out = F.linear(x, weight.values.to(x.dtype)) * weight.scale.view(-1)
        return (out if bias is None else out + bias).to(x.dtype)
    return F.linear(x, dequantize(weight, x.dtype), bias)


def gated_linear(x: Tensor, weight: QuantizedWeight, activation: Activation, bias: Tensor | None) -> Tensor:
    return gated_activation(linear(x, weight, bias), activation)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight, [out_features, in_features] of `dtype`: exact in fp32, except for rounding the
    product."""
    codes = unpack_halves(weight.values, weight.packed_columns) if weight.four_bits else weight.values
    values = codes.float()
    zero = weight.zero if weight.zero is not None else 8 if weight.four_bits else None
    group = weight.group or weight.in_features
    grouped = values.view(weight.out_features, -1, group)
    if zero is not None:
        grouped -= zero.float()[:, :, None] if isinstance(zero, Tensor) else zero
    scale = weight.scale.float().repeat_interleave(weight.scale_rows, 0)[: weight.out_features]
    return (grouped * scale[:, :, None]).flatten(1).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    values = (x.float() / scale).clamp(-largest, largest)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale
