"""Experts whose weights files hold one by one in words of several codes, as linear layers (AWQ, GPTQ,
compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from baton_kernels.quantized_linear import QuantizedWeight, dequantize
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_shape, is_transposed
from engine.model.load.safetensors_index import StoredTensor
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.experts import JOINED, StoredExperts, first_scale

WORD = 8
"""The most codes in one."""


class PackedForm(Protocol):
    """A format, as it has linear layers. name: of one, as files have it."""

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        """What files hold for a layer of that size, in untouched memory, by the ends of their names. Raises
        UnsupportedModel."""

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, Tensor | None]:
        """The weight; and which columns its columns are, None: they are in order. others: the ranks that have the
        other columns. Raises UnsupportedModel."""

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        """See `Quantization.stored_dim`."""


def packed_experts(
    form: PackedForm, name: str, stored: Mapping[str, StoredTensor], words: str, is_quantized: bool
) -> PackedExperts | None:
    """As the files hold the experts of the module of that name. words: what the names of their codes end with.
    is_quantized: without files, whether they are."""
    if not stored:
        return PackedExperts(form, name) if is_quantized else None
    found = first_scale(name, stored, (words,))
    return None if found is None else PackedExperts(form, found.removesuffix(words))


@dataclass(frozen=True, slots=True)
class PackedExperts(StoredExperts):
    """layer: one of an expert's linear layers; the others have such tensors, too.

    Until they are processed, a module has in place of each weight, behind its name, the tensors of `form`, those of all
    experts one after the other in dimension 0.
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
            tensors.pop("weight_shape", None)  # the words say it, since they are full
            delattr(module, weight)
            for kind, tensor in tensors.items():
                shape = num_experts, num_joined * tensor.shape[0], *tensor.shape[1:]
                parameter = nn.Parameter(torch.empty(shape, dtype=tensor.dtype), requires_grad=False)
                module.register_parameter(f"{weight}_{kind}", parameter)

    def parameter_shape(self, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        num_experts, rows, columns = weight
        name = next(name for name in NAMES if parameter.startswith(f"{name}_"))
        tensor = self.form.tensors(self.layer, rows // JOINED[name], columns)[parameter.removeprefix(f"{name}_")]
        return num_experts, JOINED[name] * tensor.shape[0], *tensor.shape[1:]

    def stored_dim(self, kind: str, dim: int) -> int | None:
        return self.form.stored_dim(kind, dim)

    def process(self, name: str, module: nn.Module, dtype: torch.dtype, others: RankGroup) -> None:
        for weight, num_joined in JOINED.items():
            prefix = f"{weight}_"
            tensors = {own: p.detach() for own, p in module.named_parameters(recurse=False) if own.startswith(prefix)}
            if not tensors:
                continue  # it was processed before
            for own in tensors:
                delattr(module, own)
            parts = {own.removeprefix(prefix): _apart(tensor, num_joined) for own, tensor in tensors.items()}
            ranks = others if weight == NAMES[1] else ONE_RANK
            module.register_parameter(weight, nn.Parameter(self._values(parts, dtype, ranks), requires_grad=False))

    def _values(self, parts: Mapping[str, Tensor], dtype: torch.dtype, others: RankGroup) -> Tensor:
        """[num_experts, rows, columns] of `dtype`. parts: [num_experts, num_joined, ...] each."""
        first = next(iter(parts.values()))
        experts = []
        for expert in range(first.shape[0]):
            rows = []
            for part in range(first.shape[1]):
                own = {kind: tensor[expert, part] for kind, tensor in parts.items()}
                weight, columns = self.form.weight(self.layer, own, others)
                values = dequantize(weight, dtype)
                rows.append(values if columns is None else torch.empty_like(values).index_copy_(1, columns, values))
            experts.append(torch.cat(rows))
        return torch.stack(experts)


def _apart(tensor: Tensor, num_joined: int) -> Tensor:
    """[num_experts, num_joined, ...]"""
    return tensor.reshape(tensor.shape[0], num_joined, -1, *tensor.shape[2:])
