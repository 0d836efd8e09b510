"""GPTQ: 4 or 8 bits with a scale and a zero point per group (Frantar et al., "GPTQ: Accurate Post-Training
Quantization", 2022), as AutoGPTQ and GPTQModel store them."""

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
    columns_by_group,
    replace_weight,
    scale_dtype,
    stored_parameters,
    unpack_words,
)
from engine.model.safetensors_index import StoredTensor

_LEFT_OUT = "-:"
"""The prefix of rules that exclude layers from quantization; the files' tensors show which layers are."""
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: what to add to a stored zero point."""


class Gptq(WithStoredExperts):
    """qweight: int32 [in_features * bits / 32, out_features]; qzeros: [num_groups, out_features * bits / 32]; scales:
    [num_groups, out_features]; g_idx: int32 [in_features], the group of each column."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        self._bits = int(stated.get("bits", 4))
        form = "marlin" if stated.get("is_marlin_format") else _form(stated)
        if self._bits not in (4, 8):
            raise UnsupportedModel(f"GPTQ with {self._bits} bits: only 4 and 8 can be run")
        if form not in _ZERO_OFFSETS:
            raise UnsupportedModel(f"GPTQ's checkpoint_format {form}: only {' and '.join(_ZERO_OFFSETS)} can be run")
        if stated.get("pack_dtype", "int32") != "int32":
            raise UnsupportedModel(f"GPTQ with words of {stated['pack_dtype']} (pack_dtype): only int32 can be run")
        if not all(rule.startswith(_LEFT_OUT) for rule in stated.get("dynamic") or ()):
            raise UnsupportedModel("GPTQ with rules of its own for some layers (dynamic) cannot be run")
        self._form, self._zero_offset, self._symmetric = form, _ZERO_OFFSETS[form], stated.get("sym") is True
        self._group, self._is_ordered = int(stated.get("group_size", 128)), bool(stated.get("desc_act"))
        self._stored = stored
        self._layers = QuantizedLayers(stored, ".qweight", stated.get("modules_to_not_convert"))

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        if parameter == "bias":
            return 0 if dim == 0 else None
        if parameter == "g_idx":
            return 0 if dim == 1 else None
        return 1 - dim

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name not in self._layers:
            return
        rows = module.out_features
        replace_weight(module, **self.tensors(name, rows, module.in_features))
        if module.bias is None and f"{name}.bias" in self._stored:  # AutoGPTQ writes zeros for layers without a bias
            module.bias = nn.Parameter(torch.empty(rows, dtype=torch.float16), requires_grad=False)

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name not in self._layers:
            return super().process_weights_after_loading(name, module, dtype)
        weight, columns = self.weight(name, stored_parameters(module), self._columns.get(module, ONE_RANK))
        if module.bias is not None:
            module.bias.data = module.bias.data.to(dtype)
        return install(module, weight, dtype, columns)

    def experts(self, name: str) -> StoredExperts | None:
        return packed_experts(self, name, self._stored, name in self._layers)

    def group(self, name: str) -> int:
        return max(0, self._group)

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        codes = 32 // self._bits
        group = self._group if self._group > 0 else columns
        if columns % group or rows % codes or columns % codes:
            raise UnsupportedModel(f"{name} of {columns} x {rows} cannot have GPTQ groups of {group}")
        found = {
            "qweight": torch.empty(columns // codes, rows, dtype=torch.int32),
            "qzeros": torch.empty(columns // group, rows // codes, dtype=torch.int32),
            "scales": torch.empty(columns // group, rows, dtype=scale_dtype(f"{name}.scales", self._stored)),
        }
        if f"{name}.g_idx" in self._stored:
            found["g_idx"] = torch.empty(columns, dtype=torch.int32)
        elif self._is_ordered and self._stored and group < columns:
            raise UnsupportedModel(f"{name}: desc_act without g_idx, which says to which group each column belongs")
        return found

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, Tensor | None]:
        codes = unpack_words(tensors["qweight"], self._bits, 0).t()
        zero = unpack_words(tensors["qzeros"], self._bits, 1).t() + self._zero_offset
        scale = tensors["scales"].t().contiguous()
        group = codes.shape[1] // scale.shape[1]
        columns = None
        if self._has_order(tensors):
            columns = columns_by_group(name, tensors["g_idx"], group, others)
        if columns is not None:
            codes = codes.index_select(1, columns)
        middle = 1 << (self._bits - 1)
        is_centred = not (zero != middle).any()
        if not is_centred:
            self._require_stated_form(name, zero, middle)
        if self._bits == 4:
            values = pack_halves(codes, packed_columns(codes.shape[1], group))
            return QuantizedWeight(values, scale, None if is_centred else zero.contiguous(), group), columns
        values, centred = (codes.int() - middle).to(torch.int8), (zero.int() - middle).clamp(max=127).to(torch.int8)
        return QuantizedWeight(values.contiguous(), scale, None if is_centred else centred.contiguous(), group), columns

    def _has_order(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether g_idx says anything: with a single group, columns are in order; and some files without `desc_act`
        have nothing but zeros there."""
        g_idx = tensors.get("g_idx")
        return g_idx is not None and self._group > 0 and (self._is_ordered or bool(g_idx.any()))

    def _require_stated_form(self, name: str, zero: Tensor, middle: int) -> None:
        """Raises UnsupportedModel for symmetric weights whose zero points show that they are stored in the other form
        than config.json states. zero: as the stated form has it."""
        other = middle + (1 if self._zero_offset else -1)
        if self._symmetric and (zero == other).all():
            raise UnsupportedModel(
                f"{name}: all zero points are {other}, not {middle} as symmetric weights have: its checkpoint_format "
                f"is not {self._form}"
            )


def _form(stated: Mapping[str, Any]) -> str:
    """Newer versions of GPTQModel write it by two names, or by the second alone."""
    return str(stated.get("checkpoint_format") or stated.get("format") or "gptq")
