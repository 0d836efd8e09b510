"""MXFP4 experts, as gpt-oss is published: 4 bits with a power of two per 32 columns (OCP Microscaling Formats, 1.0)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from baton_kernels.experts.weights import GROUP
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_shape
from engine.model.linear_method import Quantization
from engine.model.parallel.experts import FLAG
from engine.model.parallel.group import RankGroup
from engine.model.quantization.expert_weights import keep_quantized, store_values
from engine.model.safetensors_index import StoredTensor

log = logging.getLogger(__name__)

_SIZES = {"bits": 4, "num_bits": 4, "group_size": GROUP, "block_size": GROUP}
"""The only values that a configuration may state; the format has no others."""


class Mxfp4(Quantization):
    """gate_up_proj_blocks, down_proj_blocks: uint8, [num_experts, rows, columns / 32, 16], two codes in a byte, the
    first in its low half; gate_up_proj_scales, down_proj_scales: uint8, [num_experts, rows, columns / 32]. Biases and
    all other layers are not quantized."""

    def __init__(self, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        """Raises UnsupportedModel."""
        for name, size in _SIZES.items():
            if stated.get(name) not in (None, size):
                raise UnsupportedModel(f"MXFP4 with {name} {stated[name]}: only {size} can be run")
        self._stored = stored
        self._unquantized = list(stated.get("modules_to_not_convert") or ())
        self._columns: Mapping[nn.Module, RankGroup] = {}
        self._is_divided = False

    def divide(self, columns: Mapping[nn.Module, RankGroup]) -> None:
        self._columns, self._is_divided = columns, True

    def create_weights(self, name: str, module: nn.Linear) -> None:
        """Nothing to do: linear layers are not quantized."""

    def create_expert_weights(self, name: str, module: nn.Module) -> None:
        if not self._is_quantized(name):
            return
        for weight in NAMES:
            num_experts, rows, columns = expert_shape(module, weight)
            if columns % GROUP:
                hint = f" on each rank ({FLAG} divides whole experts)" if module in self._columns else ""
                raise UnsupportedModel(f"{name}.{weight}: blocks of {GROUP} do not divide its {columns} columns{hint}")
            scales = torch.empty(num_experts, rows, columns // GROUP, dtype=torch.uint8)
            blocks = torch.empty(*scales.shape, GROUP // 2, dtype=torch.uint8)
            delattr(module, weight)
            for kind, tensor in (("blocks", blocks), ("scales", scales)):
                self._check(f"{name}.{weight}_{kind}", tensor)
                module.register_parameter(f"{weight}_{kind}", nn.Parameter(tensor, requires_grad=False))

    def expert_block(self, name: str) -> int:
        return GROUP if self._is_quantized(name) else 1

    def process_experts(self, name: str, module: nn.Module, dtype: torch.dtype) -> bool:
        if not hasattr(module, f"{NAMES[0]}_blocks"):
            return self._is_quantized(name)
        parts = []
        for weight in NAMES:
            blocks, scales = (getattr(module, f"{weight}_{kind}").detach() for kind in ("blocks", "scales"))
            parts.append((blocks.flatten(2), scales))
            for kind in ("blocks", "scales"):
                delattr(module, f"{weight}_{kind}")
        gate_up, down = parts
        if gate_up[0].is_cuda:
            reason = keep_quantized(module, gate_up, down, dtype)
            if reason is None:
                return True
            log.warning("not kept in 4 bits: %s: %s", name, reason)
        store_values(module, gate_up, down, dtype)
        return True

    def _is_quantized(self, name: str) -> bool:
        if self._stored:
            return f"{name}.{NAMES[0]}_blocks" in self._stored
        return name not in self._unquantized

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises UnsupportedModel for files with other blocks than the format's. tensor: this rank's part of them."""
        found = self._stored.get(name)
        if found is None:
            return
        fits = found.shape[3:] == tensor.shape[3:] if self._is_divided else found.shape == tuple(tensor.shape)
        if not fits or found.dtype != "U8":
            raise UnsupportedModel(f"{name} is {found.dtype} {found.shape}, in MXFP4 U8 {tuple(tensor.shape)}")
