"""RMS norms, recognised by what they compute."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.model.fast.norm import Norm, RmsNorm, norm_forward
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.tolerance import close

_VARIANTS = [(0.0, False), (0.0, True), (1.0, True)]  # weight_offset, round_once: Llama; OLMo 2, gpt-oss; Gemma


def fuse_norms(target: Target, tally: Tally) -> None:
    """Fuse modules with one weight and an epsilon that compute an RMS norm."""
    for name, module in target.model.named_modules():
        eps = _eps(module)
        if eps is None:
            continue
        found = _recognise(target, module, eps)
        if found is not None:
            target.norms[module] = found
            target.patches.set_forward(module, norm_forward(Norm(module, found)))
        tally.add(name, "computes something else" if found is None else None)


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
    # Variants that differ only in where they round may all be within the bound: take the closest.
    nearest = min(norms, key=lambda norm: float((results[norm].float() - expected.float()).abs().max()))
    return nearest if close(results[nearest], expected) else None
