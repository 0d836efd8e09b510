"""Routing, alignment and the experts' product in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.experts.arranged import as_published
from baton_kernels.experts.weights import BLOCK, GROUP, ExpertWeights, Routing, int_group
from baton_kernels.gated_activation import reference as gated_activation


def route(logits: Tensor, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = choice = logits.float()
    if routing.scores == "softmax":
        scores = choice = logits.softmax(-1, dtype=torch.float32)
    elif routing.scores == "sigmoid":
        scores = choice = scores.sigmoid()
    if bias is not None:
        choice = choice + bias
    if routing.num_groups > 1:
        groups = choice.view(*choice.shape[:-1], routing.num_groups, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=logits.device).scatter_(-1, best, value=True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.scores == "chosen_softmax":
        weights = weights.softmax(-1)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return weights.to(dtype), ids


def align(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The choices sorted by expert, [num_blocks * rows], each expert's filled up to whole blocks with the number of
    choices; and each block's expert, [num_blocks]. Choices of `num_experts` or above are left out."""
    flat = ids.flatten()
    order, blocks = [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero()[:, 0]
        padding = -len(own) % rows
        order += [own, own.new_full((padding,), len(flat))]
        blocks += [expert] * ((len(own) + padding) // rows)
    return torch.cat(order), torch.tensor(blocks, device=ids.device)


def experts(x: Tensor, ids: Tensor, weights: Tensor, of: ExpertWeights) -> Tensor:
    """Computes one expert after the other, over the rows that chose it. Waits for a GPU; sums in fp32."""
    num_tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat.clamp(max=of.num_experts), minlength=of.num_experts + 1).tolist()
    rows = torch.split(x[order // top_k], counts)
    parts = [_one(own, expert, of) for expert, own in enumerate(rows[:-1]) if len(own)]
    left_out = x.new_zeros(counts[-1], of.hidden_size)
    results = x.new_empty(len(flat), of.hidden_size)
    results[order] = (torch.cat([*parts, left_out]) * weights.flatten()[order, None]).to(x.dtype)
    return results.view(num_tokens, top_k, -1).sum(1, dtype=torch.float32).to(x.dtype)


def _one(x: Tensor, expert: int, of: ExpertWeights) -> Tensor:
    if of.arranged:
        of, expert = as_published(of.only(expert)), 0
    hidden = F.linear(x, *_weight(of.gate_up, of.gate_up_scale, of.gate_up_bias, expert, x.dtype))
    return F.linear(gated(hidden, of), *_weight(of.down, of.down_scale, of.down_bias, expert, x.dtype))


def _weight(
    weight: Tensor, scale: Tensor | None, bias: Tensor | None, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    own = weight[expert] if scale is None else values(weight[expert], scale[expert], dtype)
    return own, None if bias is None else bias[expert]


def values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An expert's weight, [rows, columns] of `dtype`, from its codes and scales as in `ExpertWeights`."""
    if group := int_group(codes, scale):
        return _integers(codes, scale, group, dtype)
    if codes.dtype == torch.uint8:
        return dequantize(codes, scale, dtype)
    if scale.ndim == 2:
        return (codes.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).to(dtype)
    return (codes.float() * scale[:, None]).to(dtype)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values, [..., columns] of `dtype`, from MXFP4 codes, [..., columns / 2], and scales, [..., columns / 32] (see
    `ExpertWeights`). Exact in fp32 and bf16, as a value has two bits beside its exponent. A scale of 255 gives NaN."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    table = torch.cat([magnitudes, -magnitudes])
    values = table[torch.stack([codes & 15, codes >> 4], -1).int()]
    grouped = values.view(*scale.shape, GROUP) * _power_of_two(scale)[..., None]
    return grouped.flatten(-2).to(dtype)


def _integers(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    columns = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
    scales = (scale >> 16).to(torch.int16).view(torch.float16).float()
    grouped = columns.view(*scale.shape, group)
    return ((grouped - (scale & 0xFFFF)[..., None]) * scales[..., None]).flatten(-2).to(dtype)


def _power_of_two(scale: Tensor) -> Tensor:
    """2**(scale - 127), from its bits in fp32; the power for scale 0 is subnormal."""
    powers = (scale.int() << 23).clamp(min=1 << 22).view(torch.float32)
    return powers.masked_fill(scale == 255, float("nan"))


def gated(gate_up: Tensor, of: ExpertWeights) -> Tensor:
    """The gated activation: [..., 2 * intermediate_size] to [..., intermediate_size]."""
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if of.interleaved else gate_up.chunk(2, dim=-1)
    if of.gate == "clamped":
        gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * of.alpha))
    return gated_activation.gated_activation(torch.cat([gate, up], dim=-1) if of.interleaved else gate_up, of.gate)
