"""Quantized experts that files store one by one, stacked as transformers' modules have them."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn

from baton_kernels.experts.weights import BLOCK
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_shape, is_transposed
from engine.model.linear_method import Quantization
from engine.model.parallel.experts import FLAG
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.expert_weights import Codes, keep_quantized, store_values

log = logging.getLogger(__name__)

JOINED = {NAMES[0]: 2, NAMES[1]: 1}
"""How many stored weights are joined into one weight of an expert: gate and up, and down."""


def first_scale(name: str, stored: Iterable[str], suffixes: Iterable[str]) -> str | None:
    """The name of a stored scale of the module's experts, which files store one by one; None: there is none. Files may
    use another name for the experts' block than the model does."""
    layer = name.rpartition(".")[0].rpartition(".")[0]
    own = re.compile(rf"{re.escape(layer)}\.\w+\.experts\.\d+\.\w+(?:{'|'.join(map(re.escape, suffixes))})")
    return next((one for one in stored if one.startswith(layer) and own.fullmatch(one)), None)


class StoredExperts(ABC):
    """How files store the experts of a module."""

    @abstractmethod
    def create(self, name: str, module: nn.Module, hint: str = "") -> None:
        """Like `Quantization.create_expert_weights`. A parameter's name is the weight's, followed by the suffix of the
        stored tensors' names; gate and up are concatenated in dimension 1. hint: added to errors, to say that sizes
        are those of a rank's part. Raises UnsupportedModel."""

    @abstractmethod
    def parameter_shape(self, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of that name, for a weight of the shape `weight`."""

    @abstractmethod
    def process(self, name: str, module: nn.Module, dtype: torch.dtype, others: RankGroup) -> None:
        """Like `Quantization.process_experts`. others: the ranks that hold the other columns of down."""

    def stored_dim(self, kind: str, dim: int) -> int | None:
        """Like `Quantization.stored_dim`, for the parameter with that suffix."""
        return dim

    @property
    @abstractmethod
    def features_per_block(self) -> int:
        """See `Quantization.expert_block`."""


@dataclass(frozen=True, slots=True)
class Fp8Experts(StoredExperts):
    """scale: the suffix of scales' names, after the layer's. block: how many rows and columns share a scale; 0: there
    is one per row (`by_rows`), or one per stored weight.

    Until `process`, a module has its weights in float8_e4m3fn, and scales named after the weights and `scale`:
    [num_experts, rows / block, columns / block], [num_experts, rows, 1], or [num_experts, 1 or 2].
    """

    scale: str
    block: int
    by_rows: bool

    def create(self, name: str, module: nn.Module, hint: str = "") -> None:
        if is_transposed(module):
            raise UnsupportedModel(f"{name}: experts in fp8 whose outputs are columns cannot be run")
        if self.block not in (0, BLOCK):
            raise UnsupportedModel(
                f"{name}: experts in fp8 with blocks of {self.block}: only those of {BLOCK} can be run"
            )
        for weight, num_joined in JOINED.items():
            shape = expert_shape(module, weight)
            _, rows, columns = shape
            if self.block and (rows // num_joined % self.block or columns % self.block):
                sizes = f"{rows // num_joined} rows and {columns} columns{hint}"
                raise UnsupportedModel(f"{name}.{weight}: blocks of {self.block} do not divide its {sizes}")
            delattr(module, weight)
            scale = f"{weight}_{self.scale}"
            codes = torch.empty(shape, dtype=torch.float8_e4m3fn)
            for own, tensor in ((weight, codes), (scale, torch.empty(self.parameter_shape(scale, shape)))):
                module.register_parameter(own, nn.Parameter(tensor, requires_grad=False))

    def parameter_shape(self, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...]:
        name = parameter.removesuffix(f"_{self.scale}")
        if name == parameter:
            return weight
        num_experts, rows, columns = weight
        if self.block:
            return num_experts, rows // self.block, columns // self.block
        return (num_experts, rows, 1) if self.by_rows else (num_experts, JOINED[name])

    def process(self, name: str, module: nn.Module, dtype: torch.dtype, others: RankGroup) -> None:
        if not hasattr(module, f"{NAMES[0]}_{self.scale}"):
            return  # already processed
        gate_up, down = (self.take(module, weight) for weight in NAMES)
        reason = keep_quantized(module, gate_up, down, dtype) if gate_up[0].is_cuda else ""
        if reason:
            log.warning("not kept in 8 bits: %s: %s", name, reason)
        if reason is not None:
            store_values(module, gate_up, down, dtype)

    @property
    def features_per_block(self) -> int:
        return self.block or 1

    def take(self, module: nn.Module, weight: str) -> Codes:
        """The codes of the weight of that name, and its scales as in `ExpertWeights`. Removes the scales from the
        module."""
        codes, scale = (getattr(module, own).detach() for own in (weight, f"{weight}_{self.scale}"))
        delattr(module, f"{weight}_{self.scale}")
        if self.by_rows:
            scale = scale[:, :, 0].contiguous()
        elif not self.block:
            scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        return codes, scale


class WithStoredExperts(Quantization):
    """A format of linear layers that may also store experts, one by one."""

    _columns: Mapping[nn.Module, RankGroup] = {}

    @abstractmethod
    def experts(self, name: str) -> StoredExperts | None:
        """How the files store the experts of the module of that name; None: not in this format."""

    @cached_property
    def _experts(self) -> Callable[[str], StoredExperts | None]:
        """`experts`, cached per module, because it searches the names of all tensors."""
        return cache(self.experts)

    def divide(self, columns: Mapping[nn.Module, RankGroup]) -> None:
        self._columns = columns

    def create_expert_weights(self, name: str, module: nn.Module) -> None:
        if (experts := self._experts(name)) is not None:
            is_part = module in self._columns
            experts.create(name, module, f" on each rank ({FLAG} divides whole experts)" if is_part else "")

    def expert_parameter_shape(self, name: str, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...] | None:
        experts = self._experts(name)
        return None if experts is None else experts.parameter_shape(parameter, weight)

    def expert_stored_dim(self, name: str, kind: str, dim: int) -> int | None:
        experts = self._experts(name)
        if experts is None or not dim:
            return dim
        found = experts.stored_dim(kind, dim - 1)
        return None if found is None else found + 1

    def expert_block(self, name: str) -> int:
        experts = self._experts(name)
        return 1 if experts is None else experts.features_per_block

    def process_experts(self, name: str, module: nn.Module, dtype: torch.dtype) -> bool:
        if (experts := self._experts(name)) is None:
            return False
        experts.process(name, module, dtype, self._columns.get(module, ONE_RANK))
        return True
