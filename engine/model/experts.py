"""Experts in transformers' modules: their shapes and gates, and the forward that `baton_kernels.experts` computes.

These are the modules that transformers dispatches through its experts interface. They hold one tensor for gate and up
of all experts, and one for down, and are called with x, [num_tokens, hidden_size], ids and weights, [num_tokens, top_k]
both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.experts import ExpertWeights, Gate, can_compute, experts
from baton_kernels.experts.reference import gated
from baton_kernels.gated_activation import ACTIVATIONS

NAMES = ("gate_up_proj", "down_proj")
GATES: tuple[Gate, ...] = (*ACTIVATIONS, "clamped")
_USUAL = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
_ATTACHED = "baton_experts"
_ALIGNED_BYTES = 16


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, with their names, that hold experts' weights in tensors of three dimensions, or did before
    `create_expert_weights`."""
    return [(name, module) for name, module in model.named_modules() if _holds_experts(module)]


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """The sparse MoE blocks, each with a router and experts, in the order of layers."""
    names = dict.fromkeys(name.rpartition(".")[0] for name, _ in expert_modules(model))
    return [model.get_submodule(name) for name in names]


def _holds_experts(module: nn.Module) -> bool:
    return all(_weight_or_codes(module, name) for name in NAMES)


def _weight_or_codes(module: nn.Module, name: str) -> bool:
    """Whether the module has a weight of that name with a matrix for each expert, or parameters in its place."""
    if isinstance(weight := getattr(module, name, None), Tensor):
        return weight.ndim == 3
    return any(
        own.startswith(name) and tensor.ndim >= 3 for own, tensor in module._parameters.items() if tensor is not None
    )


def expert_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The number of experts, and the rows (outputs) and columns of an expert's weight."""
    num_experts, rows, columns = getattr(module, name).shape
    return (num_experts, columns, rows) if is_transposed(module) else (num_experts, rows, columns)


def why_not(module: nn.Module) -> str | None:
    """Why `experts` cannot compute the module; None: it can, provided that the module computes what its parameters
    suggest."""
    return _why_unusual(module) or _why_not_computed(weights_of(module))


def _why_unusual(module: nn.Module) -> str | None:
    if any(getattr(module, name, wanted) is not wanted for name, wanted in _USUAL.items()):
        return "its experts are not gated MLPs, or are spread over devices"
    if len(argument_names(module)) != 3:
        return "it is not called with x, ids and weights"
    return None


def _why_not_computed(of: ExpertWeights | None) -> str | None:
    if of is None:
        return "its gate is none of " + ", ".join(GATES)
    return None if can_compute(of) else "its sizes or groups are not multiples of 16 (4 bits: 32, FP8 in blocks: 128)"


def weights_of(module: nn.Module) -> ExpertWeights | None:
    """The module's weights, with an expert's outputs as rows; None: its gate is not known.

    On a GPU, weights that the module holds transposed are copied into this order; its parameters become views of the
    copy.
    """
    attached: ExpertWeights | None = module.__dict__.get(_ATTACHED)
    if attached is not None:
        return attached
    gate_up, down = (_rows_contiguous(module, name) for name in NAMES)
    return _with_gate(module, _biased(module, ExpertWeights(gate_up, down)))


def with_gate(module: nn.Module, weights: ExpertWeights) -> ExpertWeights | str:
    """The weights with the module's gate and biases; or the reason why `experts` cannot compute them."""
    of = _with_gate(module, _biased(module, weights))
    reason = _why_unusual(module) or _why_not_computed(of)
    if reason is not None:
        return reason
    assert of is not None
    return of


def _biased(module: nn.Module, of: ExpertWeights) -> ExpertWeights:
    gate_up, down = (getattr(module, f"{name}_bias", None) for name in NAMES)
    return replace(of, gate_up_bias=gate_up, down_bias=down)


def is_transposed(module: nn.Module) -> bool:
    """Whether an expert's outputs are columns (gpt-oss)."""
    return bool(getattr(module, "is_transposed", False))


def _rows_contiguous(module: nn.Module, name: str) -> Tensor:
    parameter: nn.Parameter = getattr(module, name)
    if not is_transposed(module):
        return parameter.detach()
    if parameter.is_cuda and parameter.stride(1) != 1:
        _store_by_rows(parameter)
    return parameter.detach().transpose(1, 2)


def _store_by_rows(parameter: nn.Parameter) -> None:
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):  # an inference tensor remains one
        parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)


def _with_gate(module: Any, of: ExpertWeights) -> ExpertWeights | None:
    """The weights with the known gate that agrees with the module's, compared in fp32 over small and large values."""
    if not hasattr(module, "_apply_gate"):
        return None
    of = replace(of, alpha=_number(module, "alpha", of.alpha), limit=_number(module, "limit", of.limit))
    grid = torch.linspace(-9, 9, 37)
    pairs = torch.cartesian_prod(grid, grid)
    for gate in GATES:
        for interleaved in (False, True):
            found = replace(of, gate=gate, interleaved=interleaved)
            gate_up = pairs.flatten()[None] if interleaved else pairs.t().flatten()[None]
            own, expected = module._apply_gate(gate_up.clone()), gated(gate_up, found)
            if own.shape == expected.shape and torch.allclose(own, expected, atol=1e-5, rtol=1e-5):
                return found
    return None


def _number(module: nn.Module, name: str, default: float) -> float:
    found = getattr(module, name, None)
    return float(found) if isinstance(found, int | float) else default


def attach(module: nn.Module, of: ExpertWeights) -> None:
    """Make `experts` compute the module with these weights."""
    module.__dict__[_ATTACHED] = of
    module.forward = forward_of(module, of)


def attach_share(module: nn.Module, of: ExpertWeights, num_ranks: int) -> None:
    """Make `experts` compute the module with these weights, which are one rank's equal share of all experts."""
    attach(module, replace(of, num_experts_elsewhere=(num_ranks - 1) * of.num_experts))
    module.num_experts = of.num_experts  # type: ignore[assignment] # as transformers' forward reads it


def forward_of(
    module: nn.Module, of: ExpertWeights, slot_mapping: Callable[[Tensor], Tensor | None] = lambda _: None
) -> Callable[..., Tensor]:
    """A forward for the module that calls `experts`. It accepts the argument names of the module's class, and
    leaves_sum. slot_mapping: gives `experts` that argument for x."""
    names = argument_names(module)

    def forward(*given: Tensor, leaves_sum: bool = False, **named: Tensor) -> Tensor:
        x, ids, weights = bound(names, given, named)
        return experts(x, ids, weights, of, slot_mapping(x), leaves_sum=leaves_sum)

    return forward


def can_leave_sum(module: nn.Module) -> bool:
    """Whether the module's forward takes leaves_sum."""
    return "leaves_sum" in inspect.signature(module.forward).parameters


def own_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The class's own forward, a loop over experts, whichever implementation is configured. Its first argument is the
    module."""
    forward: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    return forward


def loop_where_not_aligned(model: nn.Module) -> None:
    """Have experts' modules run their class's own forward where transformers' usual one cannot multiply their weights:
    torch's grouped_mm takes only rows of a multiple of 16 bytes."""
    for _, module in expert_modules(model):
        down = getattr(module, NAMES[1], None)  # its sizes are those of both weights
        if not isinstance(down, Tensor) or "forward" in module.__dict__:
            continue
        if any(size * down.itemsize % _ALIGNED_BYTES for size in down.shape[1:]):
            module.forward = MethodType(own_forward(module), module)


def argument_names(module: nn.Module) -> list[str]:
    """The names of the forward's arguments for x, ids and weights."""
    return list(inspect.signature(own_forward(module)).parameters)[1:]


def bound(names: Sequence[str], given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call's x, ids and weights, in this order; classes name them differently. names: see `argument_names`."""
    return (*given, *(named[name] for name in names[len(given) :])) if named else given
