"""FP8 (e4m3) weights with a scale per tensor or row, or per block of 128 x 128 (DeepSeek-V3): `fp8` and `fbgemm_fp8` in
transformers and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from baton_kernels.quantized_linear import QuantizedWeight
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod
from engine.model.quantization.experts import Fp8Experts, WithStoredExperts, first_scale
from engine.model.quantization.linear import install
from engine.model.quantization.stored import (
    QuantizedLayers,
    per_row,
    replace_weight,
    require_whole_blocks,
    scale_shape,
    stored_parameter,
)
from engine.model.safetensors_index import StoredTensor

_SCALES = (".weight_scale_inv", ".weight_scale")
_UNQUANTIZED = ("modules_to_not_convert", "ignored_layers", "ignore")


class Fp8(WithStoredExperts):
    """weight: float8_e4m3fn, [out_features, in_features]; weight_scale_inv or weight_scale: one number,
    [out_features, 1], or [out_features / block, in_features / block], by which the weight is multiplied."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        block = stated.get("weight_block_size")
        if block is not None and (len(block) != 2 or block[0] != block[1]):
            raise UnsupportedModel(f"fp8 with weight_block_size {block}: only square blocks can be run")
        self._block = int(block[0]) if block else 0
        self._stored = stored
        unquantized = next((names for key in _UNQUANTIZED if (names := stated.get(key))), None)
        self._layers = QuantizedLayers(stored, _SCALES, unquantized)

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name not in self._layers:
            return
        rows, columns = module.out_features, module.in_features
        if self._block and columns % self._block:
            raise UnsupportedModel(f"{name}: fp8 blocks of {self._block} do not divide its {columns} columns")
        scale = "weight_scale" if f"{name}.weight_scale" in self._stored else "weight_scale_inv"
        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        if self._block:
            require_whole_blocks(name, rows, self._block, self._stored.get(f"{name}.{scale}"))
            blocks: tuple[int, ...] = (-(-rows // self._block), columns // self._block)
        else:
            blocks = scale_shape(f"{name}.{scale}", self._stored, rows)
        replace_weight(module, **{"weight": weight, scale: torch.empty(blocks, dtype=torch.float32)})

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name not in self._layers:
            return super().process_weights_after_loading(name, module, dtype)
        scale = stored_parameter(module, "weight_scale" if hasattr(module, "weight_scale") else "weight_scale_inv")
        weight = stored_parameter(module, "weight")
        if self._block:
            return install(module, QuantizedWeight(weight, scale, None, self._block, self._block), dtype)
        return install(module, QuantizedWeight(weight, per_row(scale, weight.shape[0])), dtype)

    def experts(self, name: str) -> Fp8Experts | None:
        if not self._stored:
            return Fp8Experts("weight_scale_inv", self._block, by_rows=False) if name in self._layers else None
        found = first_scale(name, self._stored, _SCALES)
        if found is None:
            return None
        by_rows = not self._block and max(self._stored[found].shape, default=1) > 1
        return Fp8Experts(found.rpartition(".")[2], self._block, by_rows)
