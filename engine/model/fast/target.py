"""The model that the pieces work on, and what they have found in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model.fast.decoder import Decoder
from engine.model.fast.norm import RmsNorm
from engine.model.fast.patches import Patches
from engine.model.linear_method import LinearMethod, Product
from engine.model.parallel.group import NormSums


class Mark(NamedTuple):
    """The state of what a piece changes, to go back to if the piece is undone."""

    patches: int
    absorbed: set[nn.Module]
    products: list[LinearMethod]
    mlps_for_norms: dict[nn.Module, Product]
    fused_qkv: dict[nn.Module, FusedQkv]


@dataclass(slots=True)
class FusedQkv:
    """The product for q, k and v, which q_proj calls. method: which made it."""

    method: LinearMethod
    product: Product


@dataclass(frozen=True, slots=True)
class Summed:
    """All sums of the layers, made by norms. ranks: whose parts they sum. outputs: the linear layers at the end of
    attention."""

    ranks: NormSums
    outputs: list[nn.Module]


@dataclass(slots=True)
class Target:
    """The model, its attention modules in the order of the layers, and what earlier pieces found.

    norms: for each module that is an RMS norm, what it computes. absorbed: linear layers whose product another module
    computes. products: the linear methods of the installed products, each with weights of its own. mlps_for_norms:
    forwards of MLPs for use where only an RMS norm reads the results: it finishes them (`baton_kernels.unfinished`).
    fused_qkv: of attention modules. decoder: the layers, if their residual is kept outside of them. summed: None if
    some sum is not made by a norm.
    """

    model: PreTrainedModel
    layers: list[nn.Module]
    max_model_len: int
    patches: Patches = field(default_factory=Patches)
    norms: dict[nn.Module, RmsNorm] = field(default_factory=dict)
    absorbed: set[nn.Module] = field(default_factory=set)
    products: list[LinearMethod] = field(default_factory=list)
    mlps_for_norms: dict[nn.Module, Product] = field(default_factory=dict)
    fused_qkv: dict[nn.Module, FusedQkv] = field(default_factory=dict)
    decoder: Decoder | None = None
    summed: Summed | None = None

    def mark(self) -> Mark:
        """The current state, to go back to later."""
        return Mark(
            self.patches.mark(),
            set(self.absorbed),
            list(self.products),
            dict(self.mlps_for_norms),
            dict(self.fused_qkv),
        )

    def back_to(self, mark: Mark) -> None:
        self.patches.back_to(mark.patches)
        self.absorbed, self.products = mark.absorbed, mark.products
        self.mlps_for_norms, self.fused_qkv = mark.mlps_for_norms, mark.fused_qkv

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    def inputs(self, width: int, num_of_each: int = 1) -> Tensor:
        """Random [1, 3 * num_of_each, width] of the model's dtype: tokens with tiny, usual and large values in turn."""
        generator = torch.Generator().manual_seed(width)
        sizes = torch.tensor([[1e-3], [1.0], [5.0]]).repeat(num_of_each, 1)
        rows = torch.randn(1, 3 * num_of_each, width, generator=generator) * sizes
        return rows.to(self.model.device, self.model.dtype)
