"""GPTQ: 4 or 8 bits with a scale and a zero point per group (Frantar et al., "GPTQ: Accurate Post-Training
Quantization", 2022), as AutoGPTQ and GPTQModel store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.quantized_linear import QuantizedWeight
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.experts import StoredExperts, WithStoredExperts
from engine.model.quantization.groups import GroupedCodes
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

_LEFT_OUT = "-:"
"""The prefix of rules that exclude layers from quantization; the files' tensors show which layers are."""
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: what to add to a stored zero point."""
_WORD_BITS = 32
_ONES = {4: 0x11111111, 8: 0x01010101}
"""By bits: a word whose codes are all 1. Writers subtract it from whole words of zero points, so that one of 0 borrows
from the next; it is to be added to whole words."""


class Gptq(WithStoredExperts):
    """qweight: int32 [in_features * bits / 32, out_features]; qzeros: [num_groups, out_features * bits / 32]; scales:
    [num_groups, out_features]; g_idx: int32 [in_features], the group of each column. Where rules (`dynamic`) give some
    layers bits or groups of their own, the shapes show which."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        self._bits = int(stated.get("bits", 4))
        form = "marlin" if stated.get("is_marlin_format") else _form(stated)
        _require_bits("GPTQ", self._bits)
        if form not in _ZERO_OFFSETS:
            raise UnsupportedModel(f"GPTQ's checkpoint_format {form}: only {' and '.join(_ZERO_OFFSETS)} can be run")
        if stated.get("pack_dtype", "int32") != "int32":
            raise UnsupportedModel(f"GPTQ with words of {stated['pack_dtype']} (pack_dtype): only int32 can be run")
        self._form, self._zero_offset, self._symmetric = form, _ZERO_OFFSETS[form], stated.get("sym") is True
        self._group = int(stated.get("group_size", 128))
        rules = {rule: own for rule, own in (stated.get("dynamic") or {}).items() if not rule.startswith(_LEFT_OUT)}
        self._has_own_sizes = bool(rules)
        self._is_ordered = any(own.get("desc_act") for own in (stated, *rules.values()))
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
        rows, others = module.out_features, self._columns.get(module, ONE_RANK)
        replace_weight(module, **self.tensors(name, rows, module.in_features, others.size))
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
        return self._sizes(name)[1]

    def tensors(self, name: str, rows: int, columns: int, num_parts: int = 1) -> dict[str, Tensor]:
        bits, group = self._sizes(name)
        codes, all_columns = _WORD_BITS // bits, columns
        if self._is_ordered and self._stored:  # a rank's columns may be of any group
            all_columns *= num_parts
        group = group or all_columns
        if all_columns % group or rows % codes or columns % codes:
            raise UnsupportedModel(f"{name} of {columns} x {rows} cannot have GPTQ groups of {group}")
        found = {
            "qweight": torch.empty(columns // codes, rows, dtype=torch.int32),
            "qzeros": torch.empty(all_columns // group, rows // codes, dtype=torch.int32),
            "scales": torch.empty(all_columns // group, rows, dtype=scale_dtype(f"{name}.scales", self._stored)),
        }
        if f"{name}.g_idx" in self._stored:
            found["g_idx"] = torch.empty(columns, dtype=torch.int32)
        elif self._is_ordered and self._stored and group < all_columns:
            raise UnsupportedModel(f"{name}: desc_act without g_idx, which says to which group each column belongs")
        return found

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, Tensor | None]:
        bits, own_group = self._sizes(name)
        codes = unpack_words(tensors["qweight"], bits, 0).t()
        zero = unpack_words(tensors["qzeros"] + self._zero_offset * _ONES[bits], bits, 1).t()
        weight = GroupedCodes(codes, tensors["scales"].t(), zero, own_group or codes.shape[1], bits)
        if not (zero != weight.middle).any():
            weight = replace(weight, zero=None)
        else:
            self._require_stated_form(name, zero, weight.middle)
        columns = None
        if own_group and self._has_order(tensors):
            weight, columns = weight.by_group(name, tensors["g_idx"], others)
        return weight.quantized(), columns

    def _has_order(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether g_idx says anything: some files without `desc_act` have nothing but zeros there."""
        g_idx = tensors.get("g_idx")
        return g_idx is not None and (self._is_ordered or bool(g_idx.any()))

    def _sizes(self, name: str) -> tuple[int, int]:
        """The bits of a layer's codes, and how many columns share a scale; 0: all of them. Raises UnsupportedModel."""
        if not self._stored or not self._has_own_sizes:
            return self._bits, max(0, self._group)
        try:
            codes, zeros, scales = (self._stored[f"{name}.{kind}"].shape for kind in ("qweight", "qzeros", "scales"))
            bits = zeros[1] * _WORD_BITS // scales[1]
            _require_bits(f"{name}: GPTQ", bits)
            group = codes[0] * (_WORD_BITS // bits) // scales[0]
        except (IndexError, KeyError, ZeroDivisionError) as error:
            raise UnsupportedModel(f"{name}: qweight, qzeros and scales are not as GPTQ has them") from error
        return bits, group if scales[0] > 1 or self._group > 0 else 0

    def _require_stated_form(self, name: str, zero: Tensor, middle: int) -> None:
        """Raises UnsupportedModel for symmetric weights whose zero points show that they are stored in the other form
        than config.json states. zero: as the stated form has it."""
        other = middle + (1 if self._zero_offset else -1)
        if self._symmetric and (zero == other).all():
            raise UnsupportedModel(
                f"{name}: all zero points are {other}, not {middle} as symmetric weights have: its checkpoint_format "
                f"is not {self._form}"
            )


def _require_bits(of: str, bits: int) -> None:
    """Raises UnsupportedModel."""
    if bits not in _ONES:
        raise UnsupportedModel(f"{of} with {bits} bits: only 4 and 8 can be run")


def _form(stated: Mapping[str, Any]) -> str:
    """Newer versions of GPTQModel write it by two names, or by the second alone."""
    return str(stated.get("checkpoint_format") or stated.get("format") or "gptq")
