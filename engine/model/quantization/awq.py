"""AWQ: 4 bits with a scale and a zero point per group (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023),
as AutoAWQ's GEMM version stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.quantized_linear import QuantizedWeight, pack_halves, packed_columns
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.experts import StoredExperts, WithStoredExperts
from engine.model.quantization.linear import install
from engine.model.quantization.packed_experts import packed_experts
from engine.model.quantization.stored import (
    QuantizedLayers,
    replace_weight,
    scale_dtype,
    stored_parameters,
    unpack_words,
)
from engine.model.safetensors_index import StoredTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature of each 4 bits of a word, from the lowest bits on."""

_VERSION = ("version", "checkpoint_format", "format")
"""AutoAWQ's name of it, and GPTQModel's."""


class Awq(WithStoredExperts):
    """qweight: int32 [in_features, out_features / 8]; qzeros: [in_features / group, out_features / 8]; scales:
    [in_features / group, out_features]."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        bits = stated.get("bits", stated.get("w_bit", 4))
        version = next((str(form).lower() for key in _VERSION if (form := stated.get(key))), "gemm")
        if bits != 4 or version != "gemm":
            raise UnsupportedModel(f"AWQ with {bits} bits, version {version}: only 4 bits, version gemm, can be run")
        self._group = int(stated.get("group_size", stated.get("q_group_size", 128)))
        self._stored = stored
        self._layers = QuantizedLayers(stored, ".qweight", stated.get("modules_to_not_convert"))

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        return 1 - dim

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name in self._layers:
            replace_weight(module, **self.tensors(name, module.out_features, module.in_features))

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name not in self._layers:
            return super().process_weights_after_loading(name, module, dtype)
        weight, _ = self.weight(name, stored_parameters(module))
        return install(module, weight, dtype)

    def experts(self, name: str) -> StoredExperts | None:
        return packed_experts(self, name, self._stored, name in self._layers)

    def group(self, name: str) -> int:
        return max(0, self._group)

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        group = self._group if self._group > 0 else columns
        if columns % group or rows % 8:
            raise UnsupportedModel(f"{name} of {columns} x {rows} cannot have AWQ groups of {group}")
        return {
            "qweight": torch.empty(columns, rows // 8, dtype=torch.int32),
            "qzeros": torch.empty(columns // group, rows // 8, dtype=torch.int32),
            "scales": torch.empty(columns // group, rows, dtype=scale_dtype(f"{name}.scales", self._stored)),
        }

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, None]:
        codes = unpack_words(tensors["qweight"], 4, 1, _ORDER).t()
        zero = unpack_words(tensors["qzeros"], 4, 1, _ORDER).t().contiguous()
        scale = tensors["scales"].t().contiguous()
        group = codes.shape[1] // scale.shape[1]
        values = pack_halves(codes, packed_columns(codes.shape[1], group))
        return QuantizedWeight(values, scale, zero, group), None
