"""Quantization of a weight whose columns are divided among ranks: a row's scale depends on all its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized_linear.reference import quantize_rows
from engine.model.parallel.group import RankGroup


def quantize_columns(rows: Tensor, values: torch.dtype, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Like `quantize_rows`, for rows whose other columns are on the other ranks of the group; all of them must call."""
    if group.size == 1:
        return quantize_rows(rows, values)
    largest = rows.float().abs().amax(1, keepdim=True)
    largest = group.all_gather(largest).amax(1, keepdim=True)
    quantized, scale = quantize_rows(torch.cat([rows.float(), largest], 1), values)
    return quantized[:, :-1].contiguous(), scale
