"""An RMS norm's forward, optionally with the residual addition before it, and with the all-reduce before that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton_kernels.all_reduce_rms_norm import all_reduce_rms_norm
from baton_kernels.rms_norm import rms_norm
from engine.model.parallel.group import NormSums


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The RMS norm that a module was found to compute: the arguments of `rms_norm` besides x and the weight."""

    eps: float
    weight_offset: float
    round_once: bool


class Norm(NamedTuple):
    """A module, and the norm that it was found to compute. quantize: the dtype to which the following products quantize
    its results; None: they do not. sums: the ranks whose parts it sums first, where `RankGroup.norms_sum` says so."""

    module: nn.Module
    kind: RmsNorm
    quantize: torch.dtype | None = None
    sums: NormSums | None = None


def norm_forward(norm: Norm) -> Callable[..., Tensor]:
    """A function forward(x), or forward(x, residual), which first adds x to the residual, in place."""
    weight, quantize, ranks = norm.module.weight, norm.quantize, norm.sums
    eps, weight_offset, round_once = norm.kind.eps, norm.kind.weight_offset, norm.kind.round_once
    assert isinstance(weight, Tensor)

    def forward(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return rms_norm(
            x, weight, eps, residual=residual, weight_offset=weight_offset, round_once=round_once, quantize=quantize
        )

    if ranks is None:
        return forward

    def sum_and_forward(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if not ranks.norms_sum(x.numel() // x.shape[-1], x.shape[-1] * x.itemsize):
            return forward(x, residual)
        return all_reduce_rms_norm(
            x,
            weight,
            eps,
            ranks.all_reduce,
            ranks.peers,
            residual=residual,
            weight_offset=weight_offset,
            round_once=round_once,
            quantize=quantize,
        )

    return sum_and_forward
