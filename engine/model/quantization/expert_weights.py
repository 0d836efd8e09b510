"""Expert weights in 8 and 4 bits: quantized while they load, or kept as the files store them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from baton_kernels.experts import ExpertWeights
from baton_kernels.experts.arranged import arrange, can_arrange
from baton_kernels.experts.reference import values
from engine.model.experts import NAMES, attach, is_transposed, weights_of, why_not, with_gate
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.parallel.scales import quantize_columns

Codes = tuple[Tensor, Tensor]
"""A weight in 8 or 4 bits and its scales, as in `ExpertWeights`."""
_QUANTIZED = "baton_experts_in_8_bits"


@torch.no_grad()
def quantize_fp8(module: nn.Module, others: RankGroup = ONE_RANK) -> bool:
    """Store the weights in float8_e4m3fn with a scale per output of each expert, and make `experts` compute the module.
    On a CPU, the weights instead get the quantized values in their own dtype. Idempotent. others: the ranks that hold
    the other columns of down. Returns False if `experts` cannot compute the module."""
    if _QUANTIZED in module.__dict__:
        return True
    of = weights_of(module)
    if why_not(module) is not None or of is None:
        return False
    module.__dict__[_QUANTIZED] = True
    parts = [_quantized(weight, group) for weight, group in ((of.gate_up, ONE_RANK), (of.down, others))]
    if not of.gate_up.is_cuda:
        for weight, (values, scale) in zip((of.gate_up, of.down), parts, strict=True):
            weight.copy_(values.float() * scale[..., None])
        return True
    for name, (values, scale) in zip(NAMES, parts, strict=True):
        stored = values.transpose(1, 2) if is_transposed(module) else values
        setattr(module, name, nn.Parameter(stored, requires_grad=False))
        setattr(module, f"{name}_scale", nn.Parameter(scale, requires_grad=False))
    (gate_up, gate_up_scale), (down, down_scale) = parts
    attach(module, replace(of, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale))
    return True


@torch.no_grad()
def keep_quantized(module: nn.Module, gate_up: Codes, down: Codes, dtype: torch.dtype) -> str | None:
    """Give the module these quantized weights, and make `experts` compute it. Returns None, or the reason why that
    cannot be done. dtype: of activations."""
    of = with_gate(module, ExpertWeights(gate_up[0], down[0], gate_up_scale=gate_up[1], down_scale=down[1]))
    if isinstance(of, str):
        return of
    if can_arrange(of, dtype):
        of = arrange(of)
    stored = ((of.gate_up, of.gate_up_scale), (of.down, of.down_scale))
    for name, (codes, scale) in zip(NAMES, stored, strict=True):
        assert scale is not None
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
        setattr(module, f"{name}_scale", nn.Parameter(scale, requires_grad=False))
    attach(module, of)
    return None


@torch.no_grad()
def store_values(module: nn.Module, gate_up: Codes, down: Codes, dtype: torch.dtype) -> None:
    """Give the module the dequantized weights in `dtype`, transposed if its class has them so."""
    for name, (codes, scale) in zip(NAMES, (gate_up, down), strict=True):
        columns = codes.shape[2] * (2 if codes.dtype == torch.uint8 else 1)
        whole = torch.empty((*codes.shape[:2], columns), dtype=dtype, device=codes.device)
        for expert in range(len(codes)):  # one at a time: dequantizing takes memory in fp32
            whole[expert] = values(codes[expert], scale[expert], dtype)
        stored = whole.transpose(1, 2) if is_transposed(module) else whole
        setattr(module, name, nn.Parameter(stored, requires_grad=False))


def _quantized(weight: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Values, [num_experts, rows, columns] in fp8, and scales, [num_experts, rows]. Quantizes one expert at a time,
    since each takes three copies in fp32."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    for expert in range(weight.shape[0]):
        codes, scales = quantize_columns(weight[expert], torch.float8_e4m3fn, group)
        values[expert], scale[expert] = codes, scales[:, 0]
    return values, scale
