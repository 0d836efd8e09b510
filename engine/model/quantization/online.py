"""16-bit weights, quantized with a scale per row while they load: no calibration, no converted checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from baton_kernels.quantized_linear import QuantizedWeight
from engine.model.linear_method import LinearMethod, Quantization
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.parallel.scales import quantize_columns
from engine.model.quantization.expert_weights import quantize_fp8
from engine.model.quantization.linear import install, stays_quantized

log = logging.getLogger(__name__)

_UNQUANTIZED = ("lm_head", "embed_out", "gate", "router", "shared_expert_gate")
"""Layers that stay as they are: those with one of these in their names. They compute logits, of tokens or experts. They
are small, and decide between close values."""


_HEADS = ("lm_head", "embed_out")
_ROWS = 16384
"""How many rows to quantize at a time, which takes three copies of them in fp32."""


class _Online(Quantization):
    values: torch.dtype

    def __init__(self) -> None:
        self._columns: Mapping[nn.Module, RankGroup] = {}

    def divide(self, columns: Mapping[nn.Module, RankGroup]) -> None:
        self._columns = columns

    def create_weights(self, name: str, module: nn.Linear) -> None:
        """Nothing to do: the files have nn.Linear's parameters."""

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if self._leaves(name.split("."), module, dtype):
            return super().process_weights_after_loading(name, module, dtype)
        others = self._columns.get(module, ONE_RANK)
        parts = [quantize_columns(rows, self.values, others) for rows in torch.split(module.weight.detach(), _ROWS)]
        values, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return install(module, QuantizedWeight(values, scale), dtype)

    def _leaves(self, name: Sequence[str], module: nn.Linear, dtype: torch.dtype) -> bool:
        """Whether the module stays unquantized. name: its parts."""
        return not set(_UNQUANTIZED).isdisjoint(name)


class OnlineFp8(_Online):
    """After vLLM's `--quantization fp8`, but with a scale per output feature instead of one per tensor."""

    values = torch.float8_e4m3fn

    def process_experts(self, name: str, module: nn.Module, dtype: torch.dtype) -> bool:
        """Quantizes experts with a scale per output feature of each expert."""
        quantized = quantize_fp8(module, self._columns.get(module, ONE_RANK))
        if not quantized:
            log.warning("not quantized: %s", name)
        return quantized


class OnlineInt8(_Online):
    """Where a CPU multiplies int8, the head is quantized, too: it is a large part of a model for a CPU (Qwen2.5 0.5B:
    43% of the bytes of a step, if the head alone has 16 bits)."""

    values = torch.int8

    def _leaves(self, name: Sequence[str], module: nn.Linear, dtype: torch.dtype) -> bool:
        stays = not module.weight.is_cuda and stays_quantized(torch.int8, dtype)
        return super()._leaves(name, module, dtype) and not (stays and name[-1] in _HEADS)
