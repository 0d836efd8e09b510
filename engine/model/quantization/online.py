"""Weights of 16 bits, quantized with a scale per row while they load: no calibration, no files."""

from __future__ import annotations

import torch
from torch import nn

from baton_kernels.quantized_linear import QuantizedWeight
from baton_kernels.quantized_linear.reference import quantize_rows
from engine.model.linear_method import LinearMethod, Quantization
from engine.model.quantization.linear import install

_UNQUANTIZED = ("lm_head", "embed_out", "gate", "router", "shared_expert_gate")
"""The last parts of names: what turns into logits, of tokens or experts, is small and decides between near values."""


class _Online(Quantization):
    values: torch.dtype

    def create_weights(self, name: str, module: nn.Linear) -> None:
        """Nothing to do: the files have what nn.Linear has."""

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name.rpartition(".")[2] in _UNQUANTIZED:
            return super().process_weights_after_loading(name, module, dtype)
        return install(module, QuantizedWeight(*quantize_rows(module.weight.detach(), self.values)), dtype)


class OnlineFp8(_Online):
    """After vLLM's `--quantization fp8`, but with a scale per output feature instead of one per tensor."""

    values = torch.float8_e4m3fn


class OnlineInt8(_Online):
    values = torch.int8
