"""Matmuls on a CPU, with weights in the layout that oneDNN multiplies fastest: packed once instead of in each call.

On two cores with AVX512 (Zen 5, 9728 x 896 weights, 1 / 8 / 128 rows), `F.linear` takes 2.1 / 2.8 / 14.0 ms in fp32 and
0.65 / 0.75 / 3.1 ms in bf16. The same products with packed weights take 0.83 / 0.96 / 5.4 ms and 0.42 / 0.46 / 2.6 ms,
and with 8-bit weights and rows 0.25 / 0.27 / 1.3 ms. For few rows, memory bandwidth decides, so that 4 bits are faster
still.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.packed_linear import int4, onednn, reference

__all__ = [
    "PackedWeight",
    "can_pack",
    "can_pack_int4",
    "can_pack_int8",
    "has_bfloat16",
    "pack",
    "pack_int8",
    "packed_linear",
    "with_int4",
]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Made by `pack` or `pack_int8`. weight: in oneDNN's own layout; or plain int8, for which oneDNN has none. scale:
    [out_features], fp32, of int8 values; None: the values are not int8. few: the same weight in 4 bits, for few
    rows."""

    weight: Tensor
    scale: Tensor | None
    out_features: int
    in_features: int
    few: int4.Int4Weight | None = None


def can_pack(weight: Tensor) -> bool:
    """Whether this machine has packed products for such a weight, [out_features, in_features]."""
    return weight.device.type == "cpu" and onednn.has(weight.dtype)


def can_pack_int8() -> bool:
    """Whether this machine multiplies 8-bit numbers and sums the products in 32 bits, in one instruction. Other
    machines saturate the sums."""
    return onednn.has(torch.int8)


def has_bfloat16() -> bool:
    """Whether this machine multiplies bf16 by bf16 in one instruction. Other machines convert to fp32 and back."""
    return onednn.has_instruction("avx512_bf16", "amx_bf16")


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight, [out_features, in_features], fp32 or bf16. It is not changed or referred to. `can_pack` must
    hold."""
    return PackedWeight(onednn.pack(weight), None, *weight.shape)


def pack_int8(values: Tensor, scale: Tensor) -> PackedWeight:
    """Pack int8 values, [out_features, in_features], which are not changed or referred to. scale: [out_features] or
    [out_features, 1], fp32."""
    packed = onednn.pack_int8(values) if can_pack_int8() else values.clone()
    return PackedWeight(packed, scale.float().reshape(-1).contiguous(), *values.shape)


def can_pack_int4(in_features: int, group: int, dtype: torch.dtype) -> bool:
    """Whether this machine multiplies few rows of that dtype faster by a weight of 4 bits. group: columns with one
    scale; 0: all."""
    return int4.group_of(in_features, group, dtype) is not None


def with_int4(packed: PackedWeight, codes: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> PackedWeight:
    """The weight of bf16, of which few rows are multiplied by its codes; as it is, if it has no multiple of 64 outputs.
    codes: [out_features, in_features], from 0 to 15. scale, zero (None: 8): [out_features, num_groups]. group: as for
    `can_pack_int4`, which must hold. Nothing is referred to."""
    own = int4.group_of(packed.in_features, group, torch.bfloat16)
    assert own is not None
    if packed.out_features % int4.ROWS:
        return packed
    return replace(packed, few=int4.pack(codes, scale, zero, own))


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out_features], of x's dtype.

    x: [..., in_features]. bias: [out_features]. With an int8 weight, x is rounded to 8 bits with a scale per row, so a
    row's result does not depend on its neighbours.
    """
    assert x.shape[-1] == weight.in_features
    rows = x.reshape(-1, weight.in_features)
    if weight.few is not None and rows.shape[0] <= int4.FEW_ROWS:
        out = int4.linear(rows, weight.few, bias)
    elif weight.scale is None:
        out = onednn.linear(rows, weight.weight, bias)
    elif can_pack_int8():
        out = onednn.int8_linear(rows, weight.weight, weight.scale, bias)
    else:
        out = reference.int8_linear(rows, weight.weight, weight.scale, bias)
    return out.view(*x.shape[:-1], weight.out_features)
