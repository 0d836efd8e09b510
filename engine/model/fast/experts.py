"""Mixtures of experts: one kernel for the choice of experts, and their MLPs as products over blocks of rows.

Routers are modules with one weight that return logits, weights and ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton_kernels.experts import ROUTER_KERNEL_TOKENS, ExpertWeights, Routing, kernel_tokens, route, route_rows
from baton_kernels.experts.reference import experts as reference
from baton_kernels.experts.weights import int_group
from engine.model.attention import row_slot_mapping_of
from engine.model.experts import expert_modules, forward_of, own_forward, weights_of, why_not
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.tolerance import Tolerance, close, close_rows, rounding

_BIAS = "e_score_correction_bias"
_CHOICES_OF_EACH = 32
"""Tokens of each size for which rules of choice are compared: of a few experts, two rules may well choose the same for
three tokens."""
_FEW = 3
"""Tokens, one of each size, for which a router's kernels are compared."""
_ROUNDED_INPUTS = Tolerance(product=0.12, logits=0.5)
"""The tolerance for fp8 experts, whose inputs are rounded to fp8 twice."""


def fuse_experts(target: Target, tally: Tally) -> None:
    """Fuse modules whose gate_up_proj and down_proj have three dimensions, and that are called with x, ids and
    weights."""
    compiled: set[object] = set()
    for name, module in expert_modules(target.model):
        tally.add(name, _fuse_experts(target, module, compiled))


def _fuse_experts(target: Target, module: nn.Module, compiled: set[object]) -> str | None:
    """Returns why the module was not fused, or None. compiled: shapes for which all kernels have run."""
    if (refusal := why_not(module)) is not None:
        return refusal
    of = weights_of(module)
    assert of is not None
    x, ids, weights = _probe(target, of)
    expected = _expected(module, of, x, ids, weights)
    layer = target.layers[0]
    forward = forward_of(module, of, lambda x: row_slot_mapping_of(layer, x))
    tolerance = _ROUNDED_INPUTS if of.eight_bits and of.gate_up.is_cuda else None
    if not close(forward(x, ids, weights), expected, tolerance):
        return "differs"
    groups = int_group(of.gate_up, of.gate_up_scale), int_group(of.down, of.down_scale)
    stored = (
        of.gate_up.dtype,
        of.gate_up_scale is None,
        of.block,
        groups,
        of.gate_up_bias is None,
        of.down_bias is None,
    )
    shape = (of.gate_up.shape, of.down.shape, of.global_num_experts, of.interleaved, of.gate, ids.shape[1], *stored)
    if of.gate_up.is_cuda and shape not in compiled:
        compiled.add(shape)
        with_padding = forward_of(module, of, lambda x: torch.ones(len(x), dtype=torch.int64, device=x.device))
        for num_tokens in kernel_tokens(ids.shape[1], of.global_num_experts):
            many = [rows.repeat(-(-num_tokens // len(x)), 1)[:num_tokens] for rows in (x, ids, weights, expected)]
            for one in (forward, with_padding):  # steps that may have padding tokens use other kernels
                if not close(one(*many[:3]), many[3], tolerance):
                    return f"differs with {num_tokens} tokens"
    target.patches.set_forward(module, forward)
    return None


def _expected(module: nn.Module, of: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The module's result; for 8-bit or 4-bit weights, which its class does not know, that of the reference."""
    if of.gate_up_scale is not None:
        return reference(x, ids, weights, of)
    return own_forward(module)(module, x, ids, weights)


def _probe(target: Target, of: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids with different experts for each token, and weights."""
    config, generator = target.config, torch.Generator().manual_seed(of.num_experts)
    top_k = next((k for name in ("num_experts_per_tok", "top_k_experts") if (k := getattr(config, name, None))), 1)
    x = target.inputs(of.hidden_size)[0]
    ids = torch.stack([torch.randperm(of.num_experts, generator=generator)[:top_k] for _ in x])
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    return x, ids.to(x.device), weights.to(x.device, x.dtype)


def fuse_routing(target: Target, tally: Tally) -> None:
    """Fuse modules with a weight, [num_experts, hidden_size], and `top_k`, that return logits, weights and ids."""
    for name, module in target.model.named_modules():
        weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and isinstance(top_k, int) and not list(module.children()):
            tally.add(name, _fuse_router(target, module))


def _fuse_router(target: Target, module: Any) -> str | None:
    takes_bias = _BIAS in inspect.signature(module.forward).parameters
    own_bias = getattr(module, _BIAS, None)
    x = target.inputs(module.weight.shape[1], _CHOICES_OF_EACH)[0]
    bias = None
    if takes_bias or own_bias is not None:
        generator = torch.Generator().manual_seed(1)
        bias = torch.rand(module.weight.shape[0], generator=generator) * 0.3
        bias = bias.to(x.device, torch.float32 if own_bias is None else own_bias.dtype)
    expected = _with_bias(module, own_bias, bias, lambda: module(x, bias) if takes_bias else module(x))
    if not isinstance(expected, tuple) or len(expected) != 3:
        return "does not return logits, weights and ids"
    ids_first = not expected[0].is_floating_point()
    logits, weights, ids = reversed(expected) if ids_first else expected
    in_fp32 = _is_in_fp32(module, x, logits)
    if in_fp32 is None:
        return "its logits are no product"
    for routing in _forms(module, ids.shape[-1]):
        forward = _router_forward(module, routing, in_fp32, weights.dtype, own_bias, ids_first)
        if _same_choice(route(logits, routing, bias, weights.dtype), (weights, ids)):
            break
    else:
        return "differs"
    few, weights, ids = x[:_FEW], weights[:_FEW], ids[:_FEW]  # these compare products, too, which rounding changes
    for num_tokens in ROUTER_KERNEL_TOKENS:
        rows = few.repeat(-(-num_tokens // len(few)), 1)[:num_tokens]
        _, *chosen = forward(rows, bias)[:: -1 if ids_first else 1]
        if not _same_choice((chosen[0][: len(few)], chosen[1][: len(few)]), (weights, ids)):
            return "differs"
    target.patches.set_forward(module, forward)
    return None


def _router_forward(
    module: Any, routing: Routing, in_fp32: bool, dtype: torch.dtype, own_bias: Tensor | None, ids_first: bool
) -> Callable[..., tuple[Tensor, ...]]:
    router, router_bias = module.weight.detach(), getattr(module, "bias", None)

    def forward(x: Tensor, e_score_correction_bias: Tensor | None = own_bias) -> tuple[Tensor, ...]:
        found = route_rows(
            x.reshape(-1, x.shape[-1]),
            router,
            routing,
            router_bias=router_bias,
            bias=e_score_correction_bias,
            in_fp32=in_fp32,
            dtype=dtype,
        )
        return found[::-1] if ids_first else found

    return forward


def _with_bias(module: nn.Module, own: Tensor | None, bias: Tensor | None, call: Callable[[], Any]) -> Any:
    """The call's result with `bias` in place of the module's own, which may be zeros and so not show how it is used."""
    if own is None or bias is None:
        return call()
    before = own.clone()
    own.copy_(bias)
    try:
        return call()
    finally:
        own.copy_(before)


def _is_in_fp32(module: Any, x: Tensor, logits: Tensor) -> bool | None:
    """Whether the router multiplies in fp32, rather than in the model's dtype; None: neither gives these logits."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if close(F.linear(x, weight, bias).to(logits.dtype), logits, rounding(torch.float32)):
        return False
    whole = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return True if logits.dtype == torch.float32 and close(whole, logits) else None


def _forms(module: Any, top_k: int) -> list[Routing]:
    """The routings that such a router may compute, the likelier ones first."""
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    groups = next((n for name in ("num_group", "n_group") if (n := getattr(module, name, None))), 1)
    best = getattr(module, "topk_group", None) or 1
    known = [Routing(top_k, "chosen_softmax"), *(Routing(top_k, "softmax", norm) for norm in (False, True))]
    sigmoid = [Routing(top_k, "sigmoid", norm, scale, 1e-20, groups, best) for norm in (False, True)]
    return [*known, *sigmoid, *(replace(form, scale=scale) for form in known)]


def _same_choice(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether the weights are equal, regardless of their order, except for one token of 32, for which rounding may
    choose otherwise; and the chosen experts, for half of the tokens at least: in 16 bits, two often have equal scores.
    Where all weights are the same, as that of a single expert may be, only the experts show what was chosen."""
    if actual[0].dtype != expected[0].dtype or any(a.shape != e.shape for a, e in zip(actual, expected, strict=True)):
        return False
    num_tokens = len(actual[1])
    most = num_tokens - num_tokens // 32
    same_weights = close_rows(actual[0].sort(-1).values, expected[0].sort(-1).values)
    same_experts = (actual[1].sort(-1).values == expected[1].sort(-1).values).all(-1)
    are_all_one = close(expected[0], expected[0][:1, :1].expand_as(expected[0]))
    least = most if are_all_one else num_tokens / 2
    return int(same_weights.sum()) >= most and int(same_experts.sum()) >= least
