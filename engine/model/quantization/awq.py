"""AWQ: 4 bits with a scale and a zero per group (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023), as
AutoAWQ's GEMM version stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from baton_kernels.quantized_linear import QuantizedWeight, pack_halves, packed_columns
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod, Quantization
from engine.model.load.safetensors_index import StoredTensor
from engine.model.quantization.linear import install
from engine.model.quantization.stored import QuantizedLayers, replace_weight, stored_parameter, unpack_words

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output feature each 4 bits of a word belong to, from the lowest."""


class Awq(Quantization):
    """qweight: int32 [in_features, out_features / 8]; qzeros: [in_features / group, out_features / 8]; scales:
    [in_features / group, out_features]."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        bits, version = stated.get("bits", stated.get("w_bit", 4)), str(stated.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise UnsupportedModel(f"AWQ with {bits} bits, version {version}: only 4 bits, version gemm, can be run")
        self._group = int(stated.get("group_size", stated.get("q_group_size", 128)))
        self._layers = QuantizedLayers(stored, ".qweight", stated.get("modules_to_not_convert"))

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        return 1 - dim

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name not in self._layers:
            return
        rows, columns = module.out_features, module.in_features
        group = self._group if self._group > 0 else columns
        if columns % group or rows % 8:
            raise UnsupportedModel(f"{name} of {columns} x {rows} cannot have AWQ groups of {group}")
        replace_weight(
            module,
            qweight=torch.empty(columns, rows // 8, dtype=torch.int32),
            qzeros=torch.empty(columns // group, rows // 8, dtype=torch.int32),
            scales=torch.empty(columns // group, rows, dtype=torch.float16),
        )

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name not in self._layers:
            return super().process_weights_after_loading(name, module, dtype)
        codes = unpack_words(stored_parameter(module, "qweight"), 4, 1, _ORDER).t()
        zero = unpack_words(stored_parameter(module, "qzeros"), 4, 1, _ORDER).t().contiguous()
        scale = stored_parameter(module, "scales").t().contiguous()
        group = codes.shape[1] // scale.shape[1]
        values = pack_halves(codes, packed_columns(codes.shape[1], group))
        return install(module, QuantizedWeight(values, scale, zero, group), dtype)
