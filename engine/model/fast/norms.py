"""RMS norms, and their fusion with the residual addition before them, and with the sum over ranks before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from baton_kernels.all_reduce_rms_norm import all_reduce_rms_norm
from baton_kernels.rms_norm import rms_norm
from engine.model.fast.patches import RmsNorm, Target
from engine.model.fast.tally import Tally
from engine.model.parallel.group import RankGroup
from engine.model.tolerance import close

_VARIANTS = [(0.0, False), (0.0, True), (1.0, True)]  # weight_offset, round_once: Llama; OLMo 2, gpt-oss; Gemma


class Norm(NamedTuple):
    """A module, and what it was found to compute. quantize: the type of its results in which the products over them
    want them, if not their own. sums: the ranks whose parts it sums first, where `RankGroup.norms_sum` says so."""

    module: nn.Module
    kind: RmsNorm
    quantize: torch.dtype | None = None
    sums: RankGroup | None = None


def fuse_norms(target: Target, tally: Tally) -> None:
    """Modules with one weight and an epsilon, if they compute an RMS norm."""
    for name, module in target.model.named_modules():
        eps = _eps(module)
        if eps is None:
            continue
        found = _recognise(target, module, eps)
        if found is not None:
            target.norms[module] = found
            target.patches.set_forward(module, norm_forward(Norm(module, found)))
        tally.add(name, "computes something else" if found is None else None)


def norm_forward(norm: Norm) -> Callable[..., Tensor]:
    """forward(x), or forward(x, residual), which adds x to the residual first, in place."""
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


def _eps(module: nn.Module) -> float | None:
    """The epsilon, if the module looks like an RMS norm."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if names != ["weight"] or not isinstance(eps, float) or any(True for _ in module.children()):
        return None
    return eps if module.weight.ndim == 1 and not isinstance(module, nn.LayerNorm) else None


def _recognise(target: Target, module: nn.Module, eps: float) -> RmsNorm | None:
    weight: Any = module.weight
    x = target.inputs(weight.shape[0])
    expected = module(x)
    norms = [RmsNorm(eps, offset, once) for offset, once in _VARIANTS if once or weight.dtype == x.dtype]
    results = {norm: norm_forward(Norm(module, norm))(x) for norm in norms}
    # Variants that differ only in where they round may all be within the bound: take the nearest.
    nearest = min(norms, key=lambda norm: float((results[norm].float() - expected.float()).abs().max()))
    return nearest if close(results[nearest], expected) else None
