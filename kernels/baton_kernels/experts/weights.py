"""The weights of experts, and how a router chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from baton_kernels.gated_activation import Activation

GROUP = 32
"""How many columns of an MXFP4 weight share a scale."""
BLOCK = 128
"""Rows and columns of a weight in fp8 that have one scale, if its rows have several (DeepSeek-V3)."""
_BF16_ERROR = 2.0**-9
"""The most by which rounding to bf16 changes a number, as a share of it."""
Gate = Activation | Literal["clamped"]
"""How gate and up are combined. "clamped" (gpt-oss): `(up + 1) * gate * sigmoid(alpha * gate)`, with gate clamped to at
most `limit`, and up to within `limit` of zero."""
Scores = Literal["softmax", "sigmoid", "chosen_softmax"]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The gated MLPs of one layer.

    gate_up: [num_experts, 2 * intermediate_size, hidden_size], the rows of gate, then those of up; interleaved: rows of
        gate and up alternate. down: [num_experts, hidden_size, intermediate_size]. Both have contiguous rows.
    gate_up_bias, down_bias: [num_experts, rows], or None.
    gate_up_scale, down_scale: [num_experts, rows] in fp32, which multiply weights in float8_e4m3fn; or both in blocks:
        [num_experts, rows / 128, columns / 128], where 128 divides intermediate_size and hidden_size.

    4-bit integers (AWQ, GPTQ) are stored as uint8, with a last dimension half as long: a byte has two codes, that of
    the even column in its low half. Their scales are int32, [num_experts, rows, columns / group]: the upper 16 bits
    are a scale in fp16, the lower ones the zero point; a value is (code - zero point) * scale. See `pack_scales`.

    MXFP4 weights (OCP Microscaling Formats, version 1.0, section 5) are uint8 of the same shape, with e2m1 codes. Their
    scales are uint8, [num_experts, rows, columns / 32], each the exponent of a power of two plus 127.
    `arranged.arrange` puts both into another order.

    num_experts_elsewhere: other experts that tokens choose, too, whose weights other ranks have.
    """

    gate_up: Tensor
    down: Tensor
    gate: Gate = "silu"
    interleaved: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 1.702
    limit: float = 7.0
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    num_experts_elsewhere: int = 0

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def global_num_experts(self) -> int:
        """Among how many experts tokens choose."""
        return self.num_experts + self.num_experts_elsewhere

    @property
    def four_bits(self) -> bool:
        """Whether the weights are in MXFP4, or 4-bit integers."""
        return self.arranged or self.gate_up.dtype == torch.uint8

    @property
    def arranged(self) -> bool:
        """Whether the weights are in the order of `arranged.arrange`: words of 32 bits."""
        return self.gate_up.dtype == torch.int32

    @property
    def integers(self) -> bool:
        """Whether the weights are 4-bit integers."""
        return bool(int_group(self.gate_up, self.gate_up_scale))

    @property
    def eight_bits(self) -> bool:
        """Whether the weights are in fp8, so that rows of x may be rounded to it, too."""
        return self.gate_up_scale is not None and not self.four_bits

    @property
    def block(self) -> int:
        """How many rows and columns share a scale; 0: there are no blocks."""
        return BLOCK if self.eight_bits and self.gate_up_scale is not None and self.gate_up_scale.ndim == 3 else 0

    @property
    def scales_rows(self) -> bool:
        """Whether each row has a scale."""
        return self.eight_bits and not self.block

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.gate_up.shape[1] // 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of one value, without scales."""
        return 0.5 if self.four_bits else self.gate_up.element_size()

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, without biases."""
        stored = (self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        return sum(tensor[0].numel() * tensor.element_size() for tensor in stored if tensor is not None)

    def only(self, expert: int) -> ExpertWeights:
        """The weights of that expert alone: views."""
        stored = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
        found = {name: value[expert, None] for name in stored if (value := getattr(self, name)) is not None}
        return replace(self, **found)


def int_group(codes: Tensor, scale: Tensor | None) -> int:
    """How many columns share a scale in a weight of 4-bit integers; 0: it is of another kind."""
    if scale is None or codes.dtype != torch.uint8 or scale.dtype != torch.int32:
        return 0
    return 2 * codes.shape[-1] // scale.shape[-1]


def can_pack_scales(scale: Tensor) -> bool:
    """Whether fp16, in which `pack_scales` keeps them, has these scales as exactly as bf16 would. Below 6e-5 it has
    fewer bits, and above 65,504 none."""
    scale = scale.float()
    return bool(((scale.half().float() - scale).abs() <= scale.abs() * _BF16_ERROR).all())


def pack_scales(scale: Tensor, zero: Tensor | int) -> Tensor:
    """int32 of `scale`'s shape: of 4-bit integers, see `ExpertWeights`. scale: of which `can_pack_scales` holds. zero:
    codes from 0 to 16."""
    bits = scale.to(torch.float16).view(torch.int16).to(torch.int32) << 16
    return bits | (zero.to(torch.int32) if isinstance(zero, Tensor) else zero)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become the weights of `top_k` experts.

    scores: "softmax" of all logits; their "sigmoid"; or "chosen_softmax", of the chosen logits alone.
    normalized: divide by the sum of the chosen scores, plus epsilon. scale: multiplies the weights at the end.
    num_groups, top_groups: choose only from the `top_groups` groups of experts with the largest sums of their two best.
    """

    top_k: int
    scores: Scores = "softmax"
    normalized: bool = False
    scale: float = 1.0
    epsilon: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
