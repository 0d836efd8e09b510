"""packed_linear in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def int8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x: [num_rows, in_features]. values: [out_features, in_features], int8. scale: [out_features], fp32."""
    rows, row_scale = quantize_rows(x)
    out = F.linear(rows, values.float()) * row_scale * scale
    return (out if bias is None else out + bias).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, fp32, and a scale for each row, [num_rows, 1], fp32."""
    row_scale = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / 127
    return (x.float() / row_scale).round_(), row_scale
