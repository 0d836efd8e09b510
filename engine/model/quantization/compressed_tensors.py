"""compressed-tensors, the format of vLLM's LLM Compressor: fp8, int8 and 4-bit weights, chosen per group of layers.

config.json's `quantization_config` has `config_groups`, each with the layers that it targets and the scheme of their
weights: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.quantized_linear import QuantizedWeight
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.quantization.experts import Fp8Experts, StoredExperts, WithStoredExperts, first_scale
from engine.model.quantization.groups import GroupedCodes
from engine.model.quantization.linear import install
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.stored import (
    per_row,
    replace_weight,
    require_whole_blocks,
    scale_dtype,
    scale_shape,
    stored_parameters,
    unpack_words,
)
from engine.model.safetensors_index import StoredTensor

_VALUES = {("float", 8): torch.float8_e4m3fn, ("int", 8): torch.int8}
_OF_WORDS = {("int", 8), ("int", 4)}
_PACKED = "pack-quantized"
_PLAIN = {"float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "None"}
"""Values of `format` with which a weight has its own name and shape. That of all groups may be left out, or say that
each has its own."""
_SHAPE = "weight_shape"
_SCALE, _ZERO = ".weight_scale", ".weight_zero_point"
_STRATEGIES = ("tensor", "channel", "group", "block")
_ORDERED = (True, "group", "dynamic")
"""Values of `actorder` with which files have the group of each column. With others, columns are in order."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How a layer's weight is stored. packed: 4-bit (or 8-bit) codes in words of 32 bits. group: how many columns share
    a scale; rows: how many rows do; 0: all. ordered: whether a group's columns may be anywhere."""

    type: str
    bits: int
    packed: bool
    symmetric: bool
    per_tensor: bool
    group: int
    rows: int
    ordered: bool

    @classmethod
    def read(cls, weights: Mapping[str, Any], form: str) -> _Scheme:
        """Raises UnsupportedModel."""
        kind, bits = str(weights.get("type", "int")), int(weights.get("num_bits", 8))
        strategy = str(weights.get("strategy") or ("group" if (weights.get("group_size") or -1) > 0 else "tensor"))
        packed, symmetric = form == _PACKED, bool(weights.get("symmetric", True))
        known = (kind, bits) in _OF_WORDS if packed else (kind, bits) in _VALUES and form in _PLAIN
        if not known or strategy not in _STRATEGIES:
            raise UnsupportedModel(
                f"compressed-tensors: {form} weights of {bits} bits, {kind}, by {strategy} cannot be run"
            )
        block = weights.get("block_structure") or (128, 128)
        block = block.split("x") if isinstance(block, str) else block
        group = {"group": max(0, int(weights.get("group_size") or 0)), "block": int(block[1])}.get(strategy, 0)
        rows = int(block[0]) if strategy == "block" else 1
        if packed and strategy == "tensor" and not symmetric:
            raise UnsupportedModel("compressed-tensors: packed weights with one zero point cannot be run")
        ordered = bool(group) and weights.get("actorder") in _ORDERED
        return cls(kind, bits, packed, symmetric, strategy == "tensor", group, rows, ordered)


class CompressedTensors(WithStoredExperts):
    """weight: float8_e4m3fn or int8, [out_features, in_features]; or weight_shape, and weight_packed, int32,
    [out_features, in_features * bits / 32], whose codes begin at the lowest bits; a code is the value plus half the
    number of codes. weight_scale: [1], [out_features, 1], or one per group or block. weight_zero_point: for asymmetric
    weights, packed along the rows, or int8."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        stated = {**stated, **(stated.get("quantization_config") or {})}  # some versions of transformers nest it
        for name in ("sparsity_config", "transform_config"):
            if (stated.get(name) or {}).get("format" if name == "sparsity_config" else "config_groups") not in (
                None,
                "dense",
                {},
            ):
                raise UnsupportedModel(f"compressed-tensors with a {name} cannot be run")
        if stated.get("quantization_status", "compressed") not in ("compressed", "frozen"):
            raise UnsupportedModel(f"compressed-tensors: its status is {stated['quantization_status']}, not compressed")
        self._ignored = _targets(stated.get("ignore"))
        self._stored = stored
        groups = (stated.get("config_groups") or {}).values()
        self._groups = [
            (
                _targets(group.get("targets")),
                _Scheme.read(group["weights"], str(group.get("format") or stated.get("format"))),
            )
            for group in groups
            if group.get("weights")
        ]

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        if parameter == "weight_g_idx":
            return 0 if dim == 1 else None
        return None if parameter == _SHAPE else super().stored_dim(parameter, dim)

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if self._scheme(name) is not None:
            others = self._columns.get(module, ONE_RANK)
            replace_weight(module, **self.tensors(name, module.out_features, module.in_features, others.size))

    def group(self, name: str) -> int:
        scheme = self._scheme(name)
        return 0 if scheme is None else scheme.group

    def tensors(self, name: str, rows: int, columns: int, num_parts: int = 1) -> dict[str, Tensor]:
        scheme = self._scheme(name)
        assert scheme is not None
        # If a group's columns may be anywhere, a rank's may be of any group.
        all_columns = columns * num_parts if scheme.ordered and self._stored else columns
        if scheme.group and all_columns % scheme.group:
            raise UnsupportedModel(f"{name}: groups of {scheme.group} do not divide its {all_columns} columns")
        require_whole_blocks(name, rows, scheme.rows, self._stored.get(f"{name}{_SCALE}"))
        scales: tuple[int, ...] = (-(-rows // scheme.rows), all_columns // scheme.group if scheme.group else 1)
        if scheme.per_tensor:
            scales = scale_shape(f"{name}.weight_scale", self._stored, rows)
        # Kernels for 4 bits take scales of 16 bits; those for 8 bits have theirs in float32.
        own = scale_dtype(f"{name}{_SCALE}", self._stored) if scheme.packed and scheme.bits == 4 else torch.float32
        parameters = {"weight_scale": torch.empty(scales, dtype=own)}
        codes = 32 // scheme.bits
        if scheme.packed:
            parameters["weight_packed"] = torch.empty(rows, -(-columns // codes), dtype=torch.int32)
            parameters[_SHAPE] = torch.empty(2, dtype=torch.int64)
        else:
            parameters["weight"] = torch.empty(rows, columns, dtype=_VALUES[scheme.type, scheme.bits])
        zero = self._stored.get(f"{name}{_ZERO}")
        if not scheme.symmetric or zero is not None:
            in_words = scheme.packed and not scheme.symmetric and (zero is None or zero.dtype != "I8")
            zeros = (-(-rows // codes), *scales[1:]) if in_words else scales
            parameters[_ZERO[1:]] = torch.zeros(zeros, dtype=torch.int32 if in_words else torch.int8)
        if f"{name}.weight_g_idx" in self._stored:
            parameters["weight_g_idx"] = torch.empty(columns, dtype=torch.int32)
        elif scheme.ordered and self._stored and scheme.group < all_columns:
            raise UnsupportedModel(f"{name}: actorder without weight_g_idx, which says to which group a column belongs")
        return parameters

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        scheme = self._scheme(name)
        if scheme is None:
            return super().process_weights_after_loading(name, module, dtype)
        others = self._columns.get(module, ONE_RANK)
        shape = torch.tensor([module.out_features, module.in_features * others.size])  # unless the files have it
        weight, columns = self.weight(name, {_SHAPE: shape, **stored_parameters(module)}, others)
        return install(module, weight, dtype, columns)

    def weight(
        self, name: str, tensors: Mapping[str, Tensor], others: RankGroup = ONE_RANK
    ) -> tuple[QuantizedWeight, Tensor | None]:
        scheme = self._scheme(name)
        assert scheme is not None
        if not scheme.packed:
            return _plain(scheme, tensors), None
        packed, scale, rows = tensors["weight_packed"], tensors["weight_scale"], tensors["weight_packed"].shape[0]
        codes = unpack_words(packed, scheme.bits, 1)
        if _SHAPE in tensors:  # the shape of the whole weight, of which a rank may hold some rows or columns
            shape = tensors[_SHAPE].tolist()
            unused = codes.shape[1] - shape[1] // others.size
            if shape[0] % rows or not 0 <= unused < 32 // scheme.bits:
                raise UnsupportedModel(f"{name}: a packed weight of {shape} for words of {list(packed.shape)}")
            codes = codes[:, : codes.shape[1] - unused]
        if scheme.per_tensor:
            scale = per_row(scale, rows)
        zero = None if scheme.symmetric else _zero_codes(tensors["weight_zero_point"], scheme.bits)[:rows]
        weight, order = GroupedCodes(codes, scale, zero, scheme.group, scheme.bits), None
        groups = tensors.get("weight_g_idx")
        if groups is not None and scheme.group:
            if (groups < 0).any():  # -1: they are in order
                num = groups.numel()
                groups = (torch.arange(num, device=groups.device) + others.rank * num) // scheme.group
            weight, order = weight.by_group(name, groups, others)
        return weight.quantized(), order

    def experts(self, name: str) -> StoredExperts | None:
        """See WithStoredExperts. None also for fp8 whose blocks are not square."""
        found = first_scale(name, self._stored, (_SCALE,)) if self._stored else f"{name}.0.gate_proj{_SCALE}"
        scheme = None if found is None else self._scheme(layer := found.removesuffix(_SCALE))
        if scheme is None:
            return None
        if scheme.packed or scheme.type == "int":
            return PackedExperts(self, layer)
        if scheme.group and scheme.group != scheme.rows:
            return None
        return Fp8Experts(_SCALE[1:], scheme.group, not scheme.group and not scheme.per_tensor)

    def _scheme(self, name: str) -> _Scheme | None:
        """The scheme of the group that names the layer; else of the group whose pattern matches it; else of the group
        for its class. None: its weight is stored as it was, which files show by having no scale for it, also where
        `ignore` has another name for it, or none, because its weight is that of the embeddings. Targets may have the
        model's name of a layer, or that of the files."""
        scale = self._stored.get(f"{name}{_SCALE}")
        if self._stored and scale is None:
            return None
        names = {name, name if scale is None else scale.name.removesuffix(_SCALE)}
        if any(_matches(names, self._ignored, kind) for kind in _KINDS):
            return None
        found = (scheme for kind in _KINDS for targets, scheme in self._groups if _matches(names, targets, kind))
        return next(found, None)


def _zero_codes(zero: Tensor, bits: int) -> Tensor:
    """Zero points in words, or as values, as versions up to 0.9 stored them."""
    if zero.dtype == torch.int32:
        return unpack_words(zero, bits, 0)
    return (zero.int() + (1 << (bits - 1))).to(torch.uint8)


def _plain(scheme: _Scheme, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight from codes that are not packed into words."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    zero = None if scheme.symmetric else tensors["weight_zero_point"]
    if scheme.per_tensor:
        scale = per_row(scale, codes.shape[0])
        zero = None if zero is None else zero.reshape(1, 1).expand(codes.shape[0], 1).contiguous()
    return QuantizedWeight(codes, scale, zero, scheme.group, scheme.rows)


_KINDS = ("name", "pattern", "class")
_PATTERN = "re:"


def _targets(stated: Iterable[object] | None) -> list[str]:
    """The names, patterns and classes of layers. Raises ValueError."""
    targets = list(stated or ())
    for target in targets:
        if not isinstance(target, str):
            raise ValueError(f"{target!r} names no layers")
        if target.startswith(_PATTERN):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{target} is no pattern: {error}") from error
    return [str(target) for target in targets]


def _matches(names: Collection[str], targets: Iterable[str], kind: str) -> bool:
    """Whether one of the targets of that kind matches the module: one of its names, a pattern after `re:`, or its
    class."""
    if kind == "pattern":
        patterns = [target.removeprefix(_PATTERN) for target in targets if target.startswith(_PATTERN)]
        return any(re.match(pattern, name) for pattern in patterns for name in names)
    return not set(targets).isdisjoint(names if kind == "name" else {"Linear"})
