"""Experts that files store one by one, each like the format's linear layers: packed into words of several codes (AWQ,
GPTQ, compressed-tensors), or as int8."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from baton_kernels.experts.weights import can_pack_scales, pack_scales
from baton_kernels.quantized_linear import QuantizedWeight, dequantize, unpack_halves
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_shape, is_transposed
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.expert_weights import Codes, keep_quantized
from engine.model.quantization.experts import JOINED, StoredExperts, first_scale
from engine.model.safetensors_index import StoredTensor

log = logging.getLogger(__name__)

WORD = 8
"""The most codes in a word."""
_CODES = "weight"
"""The suffix of tensors that have the name of the weight itself."""
_WORDS = ".qweight"
"""The suffix of the codes' names in the files."""
_KINDS = ("qweight", "weight_packed", "weight_scale")
"""A module has a parameter with one of these suffixes until it is processed."""


class PackedForm(Protocol):
    """How a format stores linear layers. name: a layer's, in the files."""

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        """The tensors that files contain for a layer of that size, in untouched memory, by the suffixes of their names.
        Raises UnsupportedModel."""

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, Tensor | None]:
        """The weight, and the order of its columns (see `QuantizedLinear`); None: they are in order. others: the ranks
        that hold the other columns. Raises UnsupportedModel."""

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        """See `Quantization.stored_dim`."""

    def group(self, name: str) -> int:
        """How many columns share a scale; 0: all of them."""


def packed_experts(
    form: PackedForm, name: str, stored: Mapping[str, StoredTensor], is_quantized: bool
) -> PackedExperts | None:
    """How the files store the experts of the module of that name; None: not in this form. is_quantized: whether the
    experts are quantized if there are no files."""
    if not stored:
        return PackedExperts(form, name) if is_quantized else None
    found = first_scale(name, stored, (_WORDS,))
    return None if found is None else PackedExperts(form, found.removesuffix(_WORDS))


@dataclass(frozen=True, slots=True)
class PackedExperts(StoredExperts):
    """layer: the name of one of an expert's linear layers, in the files; the others are stored alike.

    Until `process`, a module has the tensors of `form` in place of each weight, named after it, with all experts
    stacked in dimension 0.
    """

    form: PackedForm
    layer: str

    def create(self, name: str, module: nn.Module, hint: str = "") -> None:
        if is_transposed(module):
            raise UnsupportedModel(f"{name}: experts of 4 bits whose outputs are columns cannot be run")
        for weight, num_joined in JOINED.items():
            num_experts, rows, columns = expert_shape(module, weight)
            if columns % WORD:
                raise UnsupportedModel(f"{name}.{weight}: words of codes do not divide its {columns} columns{hint}")
            try:
                tensors = self.form.tensors(self.layer, rows // num_joined, columns)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{name}.{weight}: {error}{hint}") from error
            tensors.pop("weight_shape", None)  # follows from the words, since all of them are full
            delattr(module, weight)
            for kind, tensor in tensors.items():
                shape = _joined_shape(num_experts, num_joined, tensor)
                parameter = nn.Parameter(torch.empty(shape, dtype=tensor.dtype), requires_grad=False)
                module.register_parameter(weight if kind == _CODES else f"{weight}_{kind}", parameter)

    def parameter_shape(self, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        num_experts, rows, columns = weight
        name = next(name for name in NAMES if parameter.startswith(name))
        kind = parameter.removeprefix(name).removeprefix("_") or _CODES
        return _joined_shape(
            num_experts, JOINED[name], self.form.tensors(self.layer, rows // JOINED[name], columns)[kind]
        )

    def stored_dim(self, kind: str, dim: int) -> int | None:
        return self.form.stored_dim(kind or _CODES, dim)

    @property
    def features_per_block(self) -> int:
        return math.lcm(self.form.group(self.layer) or 1, WORD)

    def process(self, name: str, module: nn.Module, dtype: torch.dtype, others: RankGroup) -> None:
        """A GPU keeps 4-bit weights; otherwise the module gets the dequantized values."""
        gate_up, down = (_taken(module, weight) for weight in NAMES)
        if not gate_up:
            return  # already processed
        stored = self._weights(gate_up, ONE_RANK), self._weights(down, others)
        if stays_packed(next(iter(gate_up.values())).device):
            reason = _why_not_packed([one for experts in stored for one in chain(*experts)])
            if reason is None:
                reason = keep_quantized(module, _codes(stored[0]), _codes(stored[1]), dtype)
            if reason is None:
                return
            log.warning("not kept in 4 bits: %s: %s", name, reason)
        for weight, experts in zip(NAMES, stored, strict=True):
            values = [torch.cat([_values(one, dtype) for one in parts]) for parts in experts]
            module.register_parameter(weight, nn.Parameter(torch.stack(values), requires_grad=False))

    def _weights(self, parts: Mapping[str, Tensor], others: RankGroup) -> list[list[_Stored]]:
        """For each expert, the stored weights to join. parts: [num_experts, num_joined, ...] each."""
        num_experts, num_joined = next(iter(parts.values())).shape[:2]

        def one(*place: int) -> _Stored:
            own = {kind: tensor[place] for kind, tensor in parts.items()}
            return _Stored(*self.form.weight(self.layer, own, others))

        return [[one(expert, part) for part in range(num_joined)] for expert in range(num_experts)]


def _joined_shape(num_experts: int, num_joined: int, tensor: Tensor) -> tuple[int, ...]:
    """The shape of such tensors of all experts together. A scalar counts as a tensor of one entry."""
    first, *others = tensor.shape or (1,)
    return num_experts, num_joined * first, *others


class _Stored(NamedTuple):
    """The weight of one of an expert's linear layers. order: of its columns; None: they are in order."""

    weight: QuantizedWeight
    order: Tensor | None


def stays_packed(device: torch.device) -> bool:
    """Whether that device keeps 4-bit weights."""
    return device.type == "cuda"


def _why_not_packed(layers: Sequence[_Stored]) -> str | None:
    """Why 4 bits of these are not kept; None: they may be. Waits for the device once, not for each of them."""
    if not all(one.weight.four_bits and one.order is None for one in layers):
        return "they have 8 bits, or columns in another order than their groups"
    if not can_pack_scales(torch.cat([one.weight.scale.flatten() for one in layers])):
        return "some of their scales are too small or too large for fp16"
    return None


def _codes(experts: list[list[_Stored]]) -> Codes:
    """The experts' 4-bit integers and scales in the form of `ExpertWeights`."""
    codes, scales = list[Tensor](), list[Tensor]()
    for parts in experts:
        weights = [one.weight for one in parts]
        whole = torch.cat([unpack_halves(weight.values, weight.packed_columns) for weight in weights])
        codes.append(whole[:, ::2] | whole[:, 1::2] << 4)
        scales.append(torch.cat([pack_scales(one.scale, 8 if one.zero is None else one.zero) for one in weights]))
    return torch.stack(codes), torch.stack(scales)


def _values(one: _Stored, dtype: torch.dtype) -> Tensor:
    values = dequantize(one.weight, dtype)
    return values if one.order is None else torch.empty_like(values).index_copy_(1, one.order, values)


def _taken(module: nn.Module, weight: str) -> dict[str, Tensor]:
    """Remove the parameters that stand for the weight from the module, and return them by suffix, each as [num_experts,
    num_joined, ...]."""
    num_joined = JOINED[weight]
    found = {own: p.detach() for own, p in module.named_parameters(recurse=False) if own.startswith(weight)}
    if not any(own.endswith(_KINDS) for own in found):
        return {}
    for own in found:
        delattr(module, own)
    return {
        own.removeprefix(weight).removeprefix("_") or _CODES: tensor.reshape(
            tensor.shape[0], num_joined, -1, *tensor.shape[2:]
        )
        for own, tensor in found.items()
    }
