"""Blocks of a router and experts whose last step, the sum of each token's experts, the norm after them may do.

A block as transformers has it makes a view of what its experts return, and so loses what they left to the norm: the
forward here does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from baton_kernels.unfinished import finished, viewed
from engine.model.experts import can_leave_sum, expert_modules
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.linear_method import Product
from engine.model.tolerance import close


def fuse_expert_sums(target: Target, tally: Tally) -> None:
    """Find the blocks that do nothing but route tokens to fused experts and add up their results, of which no other
    rank has parts. For them, `residual_norm` may use what this adds to `mlps_for_norms`."""
    for name, experts in expert_modules(target.model):
        owner = name.rpartition(".")[0]
        block = target.model.get_submodule(owner)
        router = _router_of(block, experts)
        if router is not None and can_leave_sum(experts):
            tally.add(owner, _fuse(target, block, router, experts))


def _router_of(block: nn.Module, experts: nn.Module) -> nn.Module | None:
    """The module beside the experts, if the block has no more than these two, and its class's own forward: that of a
    block whose results ranks sum is replaced."""
    others = [child for child in block.children() if child is not experts]
    own = [*block.parameters(recurse=False), *block.buffers(recurse=False)]
    return others[0] if len(others) == 1 and not own and "forward" not in block.__dict__ else None


def _fuse(target: Target, block: nn.Module, router: nn.Module, experts: nn.Module) -> str | None:
    """Returns why the norm may not do the sum, or None."""
    x = target.inputs(target.config.hidden_size)
    result = block(x)
    expected = result[0] if isinstance(result, tuple) else result
    try:
        chosen = router(x[0])
    except TypeError as error:
        return f"its router takes more than hidden states: {error}"
    if not isinstance(chosen, tuple) or len(chosen) != 3:
        return "its router does not return logits, weights and ids"
    forward = _leaving_sum(router, experts, ids_first=not chosen[0].is_floating_point())
    if not isinstance(expected, Tensor) or not close(finished(forward(x)), expected):
        return "does more than to add up its experts' results"
    target.mlps_for_norms[block] = forward
    return None


def _leaving_sum(router: nn.Module, experts: Any, ids_first: bool) -> Product:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, ids = router(rows)[:: -1 if ids_first else 1]
        return viewed(experts(rows, ids, weights, leaves_sum=True), x.shape)

    return forward
