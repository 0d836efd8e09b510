"""packed_linear of few rows with 4-bit weights, a quarter of the bytes of bf16 weights, through torch's kernel for
weight-only quantization (`aten/src/ATen/native/cpu/int4mm_kernel.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton_kernels.packed_linear.onednn import has_instruction

FEW_ROWS = 4
"""The kernel takes rows by fours, and two fours take about as long as oneDNN's product in bf16 (Zen 5, all layers of a
0.5B model: 6.2, 9.2 and 17.4 ms for 1, 4 and 6 rows; 17 to 18 in bf16)."""
_GROUPS = (256, 128, 64, 32)
ROWS = 64
"""In so many of the weight's, torch packs them."""
_TILES = 2
"""A parameter of the packed form, without meaning on a CPU."""
_MIDDLE = 8

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight of values `(code - 8) * scale + offset`. codes: in torch's own packed form. scales: [in_features /
    group, out_features, 2], bf16: scale and offset."""

    codes: Tensor
    scales: Tensor
    group: int


def group_of(in_features: int, group: int, dtype: torch.dtype) -> int | None:
    """The columns that are packed with one scale, of a weight with one for each `group` of them, 0: all; None: this
    machine has no fast product of it and x of that dtype."""
    if dtype != torch.bfloat16 or not has_instruction("avx512_f"):
        return None
    if not hasattr(_aten, "_weight_int4pack_mm_for_cpu"):
        return None
    fitting = (size for size in _GROUPS if in_features % size == 0 and (group or in_features) % size == 0)
    return next(fitting, None)


def pack(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Int4Weight:
    """codes: [out_features, in_features], from 0 to 15, of a multiple of ROWS outputs. scale, zero: [out_features, any
    number that divides the groups of `group` columns]; zero None: 8. group: see `group_of`. None of them is referred
    to."""
    num_groups = codes.shape[1] // group
    scale = scale.float()
    offset = torch.zeros_like(scale) if zero is None else (_MIDDLE - zero.float()) * scale
    scales = torch.stack([scale, offset], -1).repeat_interleave(num_groups // scale.shape[1], 1)
    packed: Tensor = _aten._convert_weight_to_int4pack_for_cpu(codes.int(), _TILES)
    return Int4Weight(packed, scales.transpose(0, 1).to(torch.bfloat16).contiguous(), group)


def linear(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """x: [num_rows, in_features], bf16."""
    out: Tensor = _aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight.codes, weight.group, weight.scales)
    return out if bias is None else out.add_(bias)
