"""Linear layers: one product for siblings over the same input, and the faster product for all others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from engine.model.fast.forwards import UnpagedAttention, run_model
from engine.model.fast.tally import Tally
from engine.model.fast.target import FusedQkv, Target
from engine.model.linear_method import LinearMethod, fusable, fuse, method_of
from engine.model.tolerance import close


def fuse_linears(target: Target, tally: Tally) -> None:
    """Replace the products that no other piece computes: o_proj, down_proj, lm_head."""
    called = _called(target)
    for name, module in target.model.named_modules():
        method = method_of(module)
        if method is not None and module not in target.absorbed:
            if module not in called and target.model.get_submodule(name.rpartition(".")[0]) in called:
                tally.add(name, "the module around it does not call it, and may read its weight")
                continue
            x = target.inputs(method.in_features)
            product = method.make_product()
            exact = close(product(x), module(x), method.tolerance)
            if exact:
                target.patches.set_forward(module, product)
                target.products.append(method)
            tally.add(name, None if exact else "differs")


def _called(target: Target) -> set[nn.Module]:
    """The modules that a forward of a few tokens calls."""
    called = set[nn.Module]()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in target.model.modules()
    ]
    try:
        run_model(target, UnpagedAttention())
    finally:
        for hook in hooks:
            hook.remove()
    return called


def fuse_qkv(target: Target, tally: Tally) -> None:
    """Fuse q_proj, k_proj and v_proj over one input: q_proj computes all three, the others return their part."""
    for name, module in target.model.named_modules():
        siblings = fusable(getattr(module, kind, None) for kind in ("q_proj", "k_proj", "v_proj"))
        if siblings and target.absorbed.isdisjoint(siblings):
            tally.add(name, _fuse_qkv(target, module, siblings))


def _fuse_qkv(target: Target, attention: nn.Module, siblings: dict[nn.Module, LinearMethod]) -> str | None:
    """Returns why they were not fused, or None."""
    methods = list(siblings.values())
    x = target.inputs(methods[0].in_features)
    expected = [module(x) for module in siblings]
    whole = fuse(methods)
    fused = FusedQkv(whole, whole.make_product())
    stash = _Stash()
    sizes = [method.out_features for method in methods]

    def forward_q(x: Tensor) -> Tensor:
        query, stash.key, stash.value = fused.product(x).split_with_sizes(sizes, dim=-1)
        stash.x = x
        return query

    def forward_k(x: Tensor) -> Tensor:
        if x is not stash.x:
            return fused.product(x).split_with_sizes(sizes, dim=-1)[1]
        return stash.key  # type: ignore[return-value]

    def forward_v(x: Tensor) -> Tensor:
        if x is not stash.x:
            return fused.product(x).split_with_sizes(sizes, dim=-1)[2]
        value = stash.value
        stash.x = stash.key = stash.value = None
        return value  # type: ignore[return-value]

    forwards = (forward_q, forward_k, forward_v)
    if not all(close(forward(x), out, whole.tolerance) for forward, out in zip(forwards, expected, strict=True)):
        return "differs"
    for module, forward in zip(siblings, forwards, strict=True):
        target.patches.set_forward(module, forward)
    target.absorbed.update(siblings)
    target.products.append(whole)
    target.fused_qkv[attention] = fused
    return None


@dataclass(slots=True)
class _Stash:
    """The results that q_proj has computed for k_proj and v_proj, and the input from which it did."""

    x: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
