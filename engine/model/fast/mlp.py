"""Gated MLPs: gate and up as one product, the activation and the multiplication in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.gated_activation import ACTIVATIONS, Activation, gated_activation
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.linear_method import LinearMethod, Product, fusable, fuse, method_of
from engine.model.tolerance import close

_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")


def fuse_gate_up(target: Target, tally: Tally) -> None:
    """Fuse modules with gate_proj, up_proj and down_proj, or with gate_up_proj and down_proj (Phi-3), and an
    activation."""
    for name, module in target.model.named_modules():
        function = next((f for f in (getattr(module, n, None) for n in _ACTIVATION_NAMES) if callable(f)), None)
        down = getattr(module, "down_proj", None)
        if not isinstance(down, nn.Module) or function is None:
            continue
        for kinds in (("gate_proj", "up_proj"), ("gate_up_proj",)):
            if parts := fusable(getattr(module, kind, None) for kind in kinds):
                tally.add(name, _fuse(target, module, function, parts, down))
                break


def _fuse(
    target: Target, module: nn.Module, function: Any, parts: dict[nn.Module, LinearMethod], down: nn.Module
) -> str | None:
    """Returns why the module was not fused, or None."""
    activation = _recognise(function)
    if activation is None:
        return "its activation is none of " + ", ".join(ACTIVATIONS)
    x = target.inputs(next(iter(parts.values())).in_features)
    expected = module(x)
    whole = fuse(parts.values())
    method = method_of(down)
    together = None if method is None else whole.make_mlp(activation, method)
    forward = together or _forward(whole.make_gated_product(activation), down)
    if not close(forward(x), expected, whole.tolerance):
        return "differs"
    target.patches.set_forward(module, forward)
    target.absorbed.update(parts)
    target.products.append(whole)
    if together is not None:
        target.absorbed.add(down)
    if method is not None and (for_norm := whole.make_mlp_for_norm(activation, method)) is not None:
        target.mlps_for_norms[module] = for_norm
    return None


def _forward(gated: Product, down: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = down(gated(x))
        return result

    return forward


def _recognise(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """The known activation that `function` computes, or None. Compared in fp32, because bf16 cannot tell the two GELUs
    apart."""
    x = torch.linspace(-8, 8, 257)
    expected = function(x)
    ones = torch.ones_like(x)
    for activation in ACTIVATIONS:
        if torch.allclose(gated_activation(torch.cat([x, ones]), activation), expected, atol=1e-6, rtol=1e-6):
            return activation
    return None
