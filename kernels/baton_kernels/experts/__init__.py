"""Mixtures of experts: routes each token to a few experts, and computes the weighted sum of their gated MLPs.

On a GPU nothing waits for the host, so that all of it can be part of a CUDA graph: choices are sorted by expert on the
device, launches are sized for the worst case, and programs without work end at once. The weights of an expert that no
token chose are not read. A token's experts are summed in a fixed order, by the last kernel or by the norm that reads
the result: the same shapes give the same bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.experts import reference
from baton_kernels.experts.tiling import BY_TOKEN_TOKENS, RowTilings, Tilings, choose, kernel_tokens
from baton_kernels.experts.weights import GROUP, ExpertWeights, Gate, Routing, Scores, int_group
from baton_kernels.linear import KERNEL_ROWS, linear
from baton_kernels.unfinished import ChosenParts, unfinished

__all__ = [
    "ROUTER_KERNEL_TOKENS",
    "ExpertWeights",
    "Gate",
    "Routing",
    "Scores",
    "can_compute",
    "experts",
    "kernel_tokens",
    "route",
    "route_rows",
]

ALIGNED = 16
"""hidden_size and intermediate_size must be multiples of this for the kernels."""
ROUTER_TOKENS = 16
"""Up to so many tokens, one kernel computes the router's product and the choice; there, each token reads the router."""
ROUTER_KERNEL_TOKENS = tuple(rows for rows in KERNEL_ROWS[:-1] if rows >= ROUTER_TOKENS)
"""Numbers of tokens that together run every kernel for a router."""


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the weights of each token's experts, [num_tokens, top_k] of `dtype`, and the experts' ids, int64, best
    first.

    logits: [num_tokens, num_experts]. bias: [num_experts], added to scores only for the choice. Which of several
    experts with equal scores is chosen is undefined.
    """
    assert logits.ndim == 2
    assert routing.top_k <= logits.shape[1]
    if logits.is_cuda and logits.stride(1) == 1:
        from baton_kernels.experts import routing_kernel

        if routing_kernel.can_group(logits.shape[1], routing.num_groups):
            return routing_kernel.route(logits, routing, bias, dtype)
    return reference.route(logits, routing, bias, dtype)


def route_rows(
    x: Tensor,
    router: Tensor,
    routing: Routing,
    *,
    router_bias: Tensor | None = None,
    bias: Tensor | None = None,
    in_fp32: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the router's logits, [num_tokens, num_experts], in x's dtype or in fp32, and `route`'s result for them.

    x: [num_tokens, hidden_size]. router: [num_experts, hidden_size]; router_bias: [num_experts]. in_fp32: convert x and
    the router to fp32 before multiplying. Calls on one device must run on one stream at a time: they share counters.
    """
    if x.is_cuda and x.shape[0] <= ROUTER_TOKENS and _can_route_few(x, router, routing):
        from baton_kernels.experts import routing_kernel

        logits_dtype = torch.float32 if in_fp32 else x.dtype
        return routing_kernel.route_few(x, router, router_bias, routing, bias, logits_dtype, dtype)
    if in_fp32:
        x, router = x.float(), router.float()
        router_bias = None if router_bias is None else router_bias.float()
    logits = linear(x, router, router_bias)
    return logits, *route(logits, routing, bias, dtype)


def _can_route_few(x: Tensor, router: Tensor, routing: Routing) -> bool:
    from baton_kernels.experts import routing_kernel

    return x.stride(1) == 1 and router.is_contiguous() and routing_kernel.can_group(router.shape[0], routing.num_groups)


def can_compute(of: ExpertWeights) -> bool:
    """Whether `experts` can compute these weights. A CPU always can. On a GPU, weights must be contiguous, and sizes
    multiples of 16 (4 bits: of 32; fp8 in blocks: of 128); groups of 4-bit integers must be multiples of 32."""
    if not of.gate_up.is_cuda or of.arranged:
        return True
    sizes, aligned = (of.hidden_size, of.intermediate_size), GROUP if of.four_bits else of.block or ALIGNED
    stored = (of.gate_up, of.down, of.gate_up_scale, of.down_scale)
    groups = int_group(of.gate_up, of.gate_up_scale), int_group(of.down, of.down_scale)
    return (
        not any(group % GROUP for group in groups)
        and all(size % aligned == 0 for size in sizes)
        and all(one is None or one.is_contiguous() for one in stored)
    )


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    slot_mapping: Tensor | None = None,
    *,
    leaves_sum: bool = False,
) -> Tensor:
    """Return the weighted sums of the experts' MLPs, [num_tokens, hidden_size], of x's dtype.

    x: [num_tokens, hidden_size], contiguous rows. ids: [num_tokens, top_k], int64; a token's experts must differ, and
    ids of `num_experts` or above mean no expert. weights: [num_tokens, top_k]. slot_mapping: [num_tokens], the slot of
    each token's KV. Tokens with slot 0, in the null block, are padding: their experts are not read, and their results
    are zeros. On a CPU it must be None. `can_compute` must hold.

    leaves_sum: leave the sum to `rms_norm`, which must be the only reader of the result (`baton_kernels.unfinished`),
    where a kernel of its own would compute it: on a GPU, for more than two tokens. The norm computes the same bits.
    """
    assert x.shape == (ids.shape[0], of.hidden_size)
    assert ids.shape == weights.shape
    if not x.is_cuda:
        assert slot_mapping is None
        return reference.experts(x, ids, weights, of)
    return on_gpu(x, ids.contiguous(), weights.contiguous(), of, slot_mapping, leaves_sum)


def on_gpu(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    slot_mapping: Tensor | None,
    leaves_sum: bool = False,
) -> Tensor:
    """`experts` by the kernels, whatever the device."""
    from baton_kernels.experts.sum_kernel import summed

    num_tokens, top_k = ids.shape
    if not num_tokens:
        return torch.empty_like(x)
    if of.arranged:
        from baton_kernels.experts import arranged_products

        chosen = arranged_products.parts_of_experts(x, ids, weights, of, slot_mapping)
    else:
        tilings = choose(num_tokens, top_k, of.global_num_experts, of.weight_bytes, of.block > 0)
        if isinstance(tilings, RowTilings):
            from baton_kernels.experts import rows_kernel

            return rows_kernel.experts(x, ids, weights, of, slot_mapping, tilings)
        chosen = in_blocks(x, ids, weights, of, slot_mapping, tilings)
    if not leaves_sum:
        return summed(chosen)
    return unfinished(torch.empty((num_tokens, of.hidden_size), dtype=x.dtype, device=x.device), chosen)


def in_blocks(
    x: Tensor, ids: Tensor, weights: Tensor, of: ExpertWeights, slot_mapping: Tensor | None, tilings: Tilings
) -> ChosenParts:
    """The parts of each token's sum by the general kernels with these tilings, whatever the device."""
    from baton_kernels.experts import kernel
    from baton_kernels.experts.alignment_kernel import align, blocks_by_token
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    num_tokens, top_k = ids.shape
    assert tilings.gate_up.rows == tilings.down.rows
    rows = tilings.gate_up.rows
    by_token = num_tokens <= min(rows, BY_TOKEN_TOKENS)
    blocks = (blocks_by_token if by_token else align)(ids, slot_mapping, of.num_experts, rows)
    rounds = of.eight_bits  # even for three tokens: multiplying in 16 bits costs twice what not quantizing x saves
    values, scale = quantize_rows(x, None, of.gate_up.dtype) if rounds else (x, None)
    early = tilings.early and not rounds
    inner = kernel.gate_up(values, scale, of, blocks, ids.numel(), top_k, tilings.gate_up, x.dtype, early)
    values, scale = quantize_rows(inner, None, of.down.dtype) if rounds else (inner, None)
    parts = kernel.down(values, scale, of, blocks, weights, tilings.down, x.dtype)
    return ChosenParts(parts, ids, slot_mapping, of.num_experts)
