"""packed_linear through those operators of torch's oneDNN that torch.compile uses for constant weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_ROWS = 128
"""oneDNN chooses the layout for this many rows. In fp32, a layout chosen for a single row is slower for all numbers of
rows (Zen 5: 0.89 instead of 0.83 ms for 1, 1.27 instead of 0.96 for 8); in bf16 both are equal."""
_ZERO = 128
"""The zero point of rows in uint8: x86 multiplies unsigned numbers by signed ones."""
_MIDDLE = torch.tensor(_ZERO + 0.5, dtype=torch.float32, device="cpu")
_VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")

_mkldnn: Any = torch.ops.mkldnn
_onednn: Any = torch.ops.onednn


@functools.cache
def has(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of weights of that dtype on this processor."""
    backend: Any = torch.backends.mkldnn
    if not backend.is_available() or not hasattr(_mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.int8:
        return hasattr(_onednn, "qlinear_pointwise") and has_instruction(*_VNNI)
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_mkldnn._is_mkldnn_bf16_supported()))


def has_instruction(*names: str) -> bool:
    """Whether the processor has any of these instruction sets, by torch's names."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in names)


def pack(weight: Tensor) -> Tensor:
    packed: Tensor = _mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def pack_int8(values: Tensor) -> Tensor:
    packed: Tensor = _onednn.qlinear_prepack(values.detach(), None)
    return packed


def int8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x: [num_rows, in_features]. The sums are exact. They are rounded to x's dtype after scaling by the weight's
    scale, and again after scaling by the row's.

    A row's scale is its largest value, which is exact in x's dtype: operators on tensors of two dtypes first copy one
    of them, which for 1024 rows of 9728 takes 24 ms instead of 0.6. For one row, every operator costs the same,
    whatever it does: hence there are as few as possible.
    """
    largest = x.abs().amax(1, keepdim=True).clamp_(min=1e-12)
    rows = x.to(torch.float32, copy=True).div_(largest.float())
    rounded = torch.add(_MIDDLE, rows, alpha=127, out=rows).to(torch.uint8)  # the cast truncates
    zeros = _zeros(scale.shape[0])
    out: Tensor = _onednn.qlinear_pointwise(
        rounded, 1 / 127, _ZERO, values, scale, zeros, None, 1.0, 0, x.dtype, "none", [], ""
    )
    out.mul_(largest)
    return out if bias is None else out.add_(bias)


@functools.cache
def _zeros(num: int) -> Tensor:
    """The zero points of a weight's rows."""
    return torch.zeros(num, dtype=torch.int32)
