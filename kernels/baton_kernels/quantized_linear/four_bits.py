"""4-bit weights in groups of 128, in the order in which Hopper's tensor cores take them from registers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import pdl
from baton_kernels.quantized_linear.weights import FourBitWeight, QuantizedWeight, unpack_halves

GROUP = 128
"""How many columns share a scale."""
STEP = 2 * GROUP
"""Columns of a step of the kernel; the codes of its two groups share bytes."""
_PADDING = 128
"""Scales after the last row of a group: a tile that is not full reads them, but does not use them."""
HALVES = (torch.float16, torch.bfloat16)
"""The possible dtypes of x, and of scales."""


def can_arrange(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether the weight can be arranged, and its device has a kernel for that and for x of `dtype`."""
    device = weight.values.device
    if dtype not in HALVES or not pdl.supported(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return has_order(weight)


def has_order(weight: QuantizedWeight) -> bool:
    """Whether the weight can be arranged, on any device. Features come in eights, those of gate and of up as well."""
    fits = weight.in_features % STEP == 0 and weight.out_features % 16 == 0 and weight.scale_rows == 1
    return weight.four_bits and weight.group == GROUP and fits and weight.scale.dtype in HALVES


def arrange(weight: QuantizedWeight) -> FourBitWeight:
    """The arranged weight; `has_order` must hold. The given weight is not changed or referred to."""
    assert has_order(weight)
    steps = weight.values.view(weight.out_features, -1, 2, 4, 2, 4, 2)  # columns: h, j, q, t, p
    words = steps.permute(0, 1, 5, 2, 3, 6, 4).contiguous().view(weight.out_features, -1).view(torch.int32)
    zero = torch.full_like(weight.scale, 8, dtype=torch.uint8) if weight.zero is None else weight.zero
    scales = torch.zeros(
        weight.in_features // GROUP, weight.out_features + _PADDING, dtype=torch.int32, device=words.device
    )
    bits = weight.scale.contiguous().view(torch.int16).int() << 16
    scales[:, : weight.out_features] = (bits | zero.int()).t()
    return FourBitWeight(words, scales, weight.scale.dtype)


def dequantize(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight, [out_features, in_features]; each product of value and scale is rounded to `dtype`."""
    if weight.words.is_cuda:
        from baton_kernels.quantized_linear.dequantize_kernel import dequantize_four_bits

        return dequantize_four_bits(weight, dtype)
    steps = weight.words.view(torch.uint8).view(weight.out_features, -1, 4, 2, 4, 2, 2)  # t, h, j, p, q
    packed = steps.permute(0, 1, 3, 4, 6, 2, 5).reshape(weight.out_features, -1)
    scales = weight.scales[:, : weight.out_features].t()
    scale = (scales >> 16).to(torch.int16).view(weight.scale_dtype).float()
    grouped = unpack_halves(packed, STEP).float().view(weight.out_features, -1, GROUP)
    return ((grouped - (scales & 255)[:, :, None]) * scale[:, :, None]).flatten(1).to(dtype)
