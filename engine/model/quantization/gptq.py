"""GPTQ: 4 or 8 bits with a scale and a zero per group (Frantar et al., "GPTQ: Accurate Post-Training Quantization",
2022), as AutoGPTQ and GPTQModel store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from baton_kernels.quantized_linear import QuantizedWeight, pack_halves, packed_columns
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod, Quantization
from engine.model.load.safetensors_index import StoredTensor
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.linear import install
from engine.model.quantization.stored import (
    QuantizedLayers,
    columns_by_group,
    replace_weight,
    stored_parameter,
    unpack_words,
)

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: what to add to a stored zero."""


class Gptq(Quantization):
    """qweight: int32 [in_features * bits / 32, out_features]; qzeros: [num_groups, out_features * bits / 32]; scales:
    [num_groups, out_features]; g_idx: int32 [in_features], the group of each column."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        self._bits = int(stated.get("bits", 4))
        form = str(stated.get("checkpoint_format") or "gptq")
        if self._bits not in (4, 8):
            raise UnsupportedModel(f"GPTQ with {self._bits} bits: only 4 and 8 can be run")
        if form not in _ZERO_OFFSETS:
            raise UnsupportedModel(f"GPTQ's checkpoint_format {form}: only {' and '.join(_ZERO_OFFSETS)} can be run")
        if stated.get("dynamic"):
            raise UnsupportedModel("GPTQ with rules of its own for some layers (dynamic) cannot be run")
        self._zero_offset = _ZERO_OFFSETS[form]
        self._group = int(stated.get("group_size", 128))
        self._stored = stored
        self._layers = QuantizedLayers(stored, ".qweight", stated.get("modules_to_not_convert"))
        self._columns: Mapping[nn.Module, RankGroup] = {}

    def divide(self, columns: Mapping[nn.Module, RankGroup]) -> None:
        self._columns = columns

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        if parameter == "bias":
            return 0 if dim == 0 else None
        if parameter == "g_idx":
            return 0 if dim == 1 else None
        return 1 - dim

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name not in self._layers:
            return
        rows, columns, codes = module.out_features, module.in_features, 32 // self._bits
        group = self._group if self._group > 0 else columns
        if columns % group or rows % codes or columns % codes:
            raise UnsupportedModel(f"{name} of {columns} x {rows} cannot have GPTQ groups of {group}")
        replace_weight(
            module,
            qweight=torch.empty(columns // codes, rows, dtype=torch.int32),
            qzeros=torch.empty(columns // group, rows // codes, dtype=torch.int32),
            scales=torch.empty(columns // group, rows, dtype=torch.float16),
        )
        if f"{name}.g_idx" in self._stored:
            module.g_idx = nn.Parameter(torch.empty(columns, dtype=torch.int32), requires_grad=False)
        if module.bias is None and f"{name}.bias" in self._stored:  # AutoGPTQ writes zeros for layers without
            module.bias = nn.Parameter(torch.empty(rows, dtype=torch.float16), requires_grad=False)

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name not in self._layers:
            return super().process_weights_after_loading(name, module, dtype)
        codes = unpack_words(stored_parameter(module, "qweight"), self._bits, 0).t()
        zero = unpack_words(stored_parameter(module, "qzeros"), self._bits, 1).t() + self._zero_offset
        scale = stored_parameter(module, "scales").t().contiguous()
        group = codes.shape[1] // scale.shape[1]
        columns = None
        if hasattr(module, "g_idx"):
            columns = columns_by_group(
                name, stored_parameter(module, "g_idx"), group, self._columns.get(module, ONE_RANK)
            )
        if columns is not None:
            codes = codes.index_select(1, columns)
        if module.bias is not None:
            module.bias.data = module.bias.data.to(dtype)
        if self._bits == 4:
            values = pack_halves(codes, packed_columns(codes.shape[1], group))
            weight = QuantizedWeight(values, scale, zero.contiguous() if (zero != 8).any() else None, group)
        else:
            values, centred = (codes.int() - 128).to(torch.int8), (zero.int() - 128).clamp(max=127).to(torch.int8)
            weight = QuantizedWeight(values.contiguous(), scale, centred.contiguous() if centred.any() else None, group)
        return install(module, weight, dtype, columns)
