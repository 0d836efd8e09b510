"""Linear layers: siblings over the same input as one product, and the faster product itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from baton_kernels.linear import linear
from engine.model.fast.patches import Target, close
from engine.model.fast.tally import Tally


def fuse_linears(target: Target, tally: Tally) -> None:
    """The products that no other piece makes: o_proj, down_proj, lm_head."""
    for name, module in target.model.named_modules():
        if is_plain(module) and module not in target.absorbed:
            x = target.inputs(module.in_features)
            exact = close(linear(x, module.weight, module.bias), module(x))
            if exact:
                target.patches.set_forward(module, linear_forward(module.weight, module.bias))
            tally.add(name, None if exact else "differs")


def fuse_qkv(target: Target, tally: Tally) -> None:
    """q_proj, k_proj and v_proj over one input: q_proj computes all three, the others hand out their part."""
    for name, module in target.model.named_modules():
        siblings = [getattr(module, kind, None) for kind in ("q_proj", "k_proj", "v_proj")]
        if fusable(siblings) and target.absorbed.isdisjoint(siblings):
            tally.add(name, _fuse_qkv(target, siblings))


def _fuse_qkv(target: Target, siblings: list[nn.Linear]) -> str | None:
    """Why not, or None."""
    q, k, v = siblings
    x = target.inputs(q.in_features)
    expected = [module(x) for module in siblings]
    weight, bias = fuse_weights(siblings)
    stash = _Stash()
    sizes = [module.out_features for module in siblings]

    def forward_q(x: Tensor) -> Tensor:
        query, stash.key, stash.value = linear(x, weight, bias).split(sizes, dim=-1)  # type: ignore[no-untyped-call]
        stash.x = x
        return query  # type: ignore[no-any-return]

    def forward_k(x: Tensor) -> Tensor:
        return stash.key if x is stash.x else linear(x, k.weight, k.bias)  # type: ignore[return-value]

    def forward_v(x: Tensor) -> Tensor:
        if x is not stash.x:
            return linear(x, v.weight, v.bias)
        value = stash.value
        stash.x = stash.key = stash.value = None
        return value  # type: ignore[return-value]

    forwards = (forward_q, forward_k, forward_v)
    if not all(close(forward(x), out) for forward, out in zip(forwards, expected, strict=True)):
        return "differs"
    for module, forward in zip(siblings, forwards, strict=True):
        target.patches.set_forward(module, forward)
    target.absorbed.update(siblings)
    return None


@dataclass(slots=True)
class _Stash:
    """What q_proj left for k_proj and v_proj, and of which input."""

    x: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


def linear_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return linear(x, weight, bias)

    return forward


def fusable(modules: list[nn.Module | None]) -> TypeGuard[list[nn.Linear]]:
    """Plain linear layers that could be one."""
    if not all(is_plain(module) for module in modules):
        return False
    first: nn.Linear = modules[0]  # type: ignore[assignment]
    return all(
        module.in_features == first.in_features  # type: ignore[union-attr]
        and module.weight.dtype == first.weight.dtype  # type: ignore[union-attr]
        and (module.bias is None) == (first.bias is None)  # type: ignore[union-attr]
        for module in modules
    )


def is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Neither quantised nor an adapter's."""
    return type(module) is nn.Linear and module.weight.is_floating_point()


@torch.inference_mode(False)
@torch.no_grad()
def fuse_weights(modules: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight [sum of out_features, in_features] and one bias for all; the modules' own become views of them.

    Weights that lie one after the other already are not copied.
    """
    weight = _joined([module.weight for module in modules])
    if modules[0].bias is None:
        return weight, None
    return weight, _joined([module.bias for module in modules])


def _joined(parts: list[Tensor]) -> Tensor:
    first = parts[0]
    if _adjacent(parts):
        rows = sum(part.shape[0] for part in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole


def _adjacent(parts: list[Tensor]) -> bool:
    end = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return False
        end += part.numel() * part.element_size()
    return True
