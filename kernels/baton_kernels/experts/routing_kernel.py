"""Chooses experts in Triton, in registers from the logits to the weights. For few tokens, the same kernel also computes
the router's product."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.experts.weights import Routing
from baton_kernels.linear.kernel import arrival_counters
from baton_kernels.linear.tiling import MAX_TILES
from baton_kernels.pdl import launch_options

PER_PROGRAM = 4
DEPTH = 256
STAGES = 4
"""For the router's product of few tokens: experts per program, columns per step, and how many loads run ahead."""


@triton.jit
def _grouped(choice, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EXPERTS: tl.constexpr):
    """`choice`, with -inf outside the best groups; a group's score is the sum of its two best experts."""
    LOWEST: tl.constexpr = float("-inf")
    groups = tl.reshape(choice, [NUM_GROUPS, EXPERTS // NUM_GROUPS])
    place = tl.arange(0, EXPERTS // NUM_GROUPS)[None, :]
    first = tl.max(groups, 1)
    at = tl.argmax(groups, 1, tie_break_left=True)
    score = first + tl.max(tl.where(place == at[:, None], LOWEST, groups), 1)
    group = tl.arange(0, NUM_GROUPS)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = group == tl.argmax(score, 0, tie_break_left=True)
        kept = kept | best
        score = tl.where(best, LOWEST, score)
    return tl.reshape(tl.where(kept[:, None], groups, LOWEST), [EXPERTS])


@triton.jit
def _choose(
    logits,
    token,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store the token's weights and ids. logits: [EXPERTS], fp32, -inf beyond the experts."""
    LOWEST: tl.constexpr = float("-inf")
    lane = tl.arange(0, EXPERTS)
    mask = lane < NUM_EXPERTS
    if SCORES == "softmax":
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORES == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        scores = logits
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    choice = tl.where(mask, choice, LOWEST)
    if NUM_GROUPS > 1:
        choice = _grouped(choice, NUM_GROUPS, TOP_GROUPS, EXPERTS)
    slot = tl.arange(0, CHOICES)
    ids = tl.zeros([CHOICES], tl.int32)
    values = tl.full([CHOICES], LOWEST if SCORES == "chosen_softmax" else 0.0, tl.float32)
    for k in tl.static_range(TOP_K):
        # NaN may make a masked lane the best: an id is within bounds whatever the logits are.
        best = tl.minimum(tl.argmax(choice, 0, tie_break_left=True), NUM_EXPERTS - 1)
        value = tl.sum(tl.where(lane == best, scores, 0.0), 0)
        ids = tl.where(slot == k, best, ids)
        values = tl.where(slot == k, value, values)
        choice = tl.where(lane == best, LOWEST, choice)
    if SCORES == "chosen_softmax":
        powers = tl.exp(values - tl.max(values, 0))
        values = powers / tl.sum(powers, 0)
    if NORMALIZED:
        values = values / (tl.sum(values, 0) + EPSILON)
    values *= SCALE
    out = token * TOP_K + slot
    tl.store(weights_ptr + out, values.to(weights_ptr.dtype.element_ty), mask=slot < TOP_K)
    tl.store(ids_ptr + out, ids.to(tl.int64), mask=slot < TOP_K)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    logits_ptrs = logits_ptr + token * logits_stride + lane
    logits = tl.load(logits_ptrs, mask=lane < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _choose(
        logits, token, bias_ptr, weights_ptr, ids_ptr, NUM_EXPERTS, EXPERTS, TOP_K, CHOICES, SCORES, NORMALIZED, SCALE,
        EPSILON, NUM_GROUPS, TOP_GROUPS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _router_kernel(
    x_ptr,
    router_ptr,
    router_bias_ptr,
    logits_ptr,
    arrived_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    x_stride,
    HIDDEN: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The router's product and the choice. Each program computes a few logits of one token; the last one to finish
    chooses the token's experts."""
    EVEN: tl.constexpr = HIDDEN % DEPTH == 0
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    mask = expert < NUM_EXPERTS
    row = tl.minimum(expert, NUM_EXPERTS - 1)
    column = tl.arange(0, DEPTH)
    router_ptrs = router_ptr + row[:, None] * HIDDEN + column[None, :]
    x_ptrs = x_ptr + token * x_stride + column
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([PER_PROGRAM, DEPTH], tl.float32)
    for k in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
        if EVEN:
            sums += tl.load(router_ptrs).to(tl.float32) * tl.load(x_ptrs).to(tl.float32)[None, :]
        else:
            inside = column < HIDDEN - k
            x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
            sums += tl.load(router_ptrs, mask=inside[None, :], other=0.0).to(tl.float32) * x
        router_ptrs += DEPTH
        x_ptrs += DEPTH
    own = tl.sum(sums, 1)
    if HAS_ROUTER_BIAS:
        own += tl.load(router_bias_ptr + row).to(tl.float32)
    tl.store(logits_ptr + token * NUM_EXPERTS + expert, own.to(logits_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # order all threads' stores before the release by one thread
    last = tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(arrived_ptr + token, 0)  # the next matmul expects zeros
        lane = tl.arange(0, EXPERTS)
        logits_ptrs = logits_ptr + token * NUM_EXPERTS + lane
        # read them from memory, where the other programs stored theirs
        logits = tl.load(logits_ptrs, mask=lane < NUM_EXPERTS, other=float("-inf"), cache_modifier=".cg")
        _choose(
            logits.to(tl.float32), token, bias_ptr, weights_ptr, ids_ptr, NUM_EXPERTS, EXPERTS, TOP_K, CHOICES, SCORES,
            NORMALIZED, SCALE, EPSILON, NUM_GROUPS, TOP_GROUPS, HAS_BIAS,
        )  # fmt: skip


def can_group(num_experts: int, num_groups: int) -> bool:
    """Whether the kernel can choose among groups: both numbers must be powers of two."""
    return num_groups == 1 or (num_experts & (num_experts - 1) == 0 and num_groups & (num_groups - 1) == 0)


def route(logits: Tensor, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the package's `route`. logits: [num_tokens, num_experts], contiguous rows."""
    num_tokens, num_experts = logits.shape
    weights, ids = _empty(num_tokens, routing, dtype, logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, weights, ids, logits.stride(0),
            *_constants(num_experts, routing), bias is not None,
            num_warps=1 if num_experts <= 256 else 4, **launch_options(logits.device),
        )  # fmt: skip
    return weights, ids


def route_few(
    x: Tensor, router: Tensor, router_bias: Tensor | None, routing: Routing, bias: Tensor | None,
    logits_dtype: torch.dtype, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns logits, [num_tokens, num_experts], weights and ids. x: [num_tokens, hidden_size], contiguous rows, at
    most MAX_TILES tokens. router: [num_experts, hidden_size], contiguous."""
    num_tokens, (num_experts, hidden) = x.shape[0], router.shape
    assert num_tokens <= MAX_TILES
    logits = torch.empty((num_tokens, num_experts), dtype=logits_dtype, device=x.device)
    weights, ids = _empty(num_tokens, routing, dtype, x.device)
    if num_tokens:
        _router_kernel[(triton.cdiv(num_experts, PER_PROGRAM), num_tokens)](
            x, router, logits if router_bias is None else router_bias, logits, arrival_counters(x.device),
            logits if bias is None else bias, weights, ids, x.stride(0),
            hidden, PER_PROGRAM, DEPTH, STAGES, router_bias is not None, *_constants(num_experts, routing),
            bias is not None, num_warps=1 if num_experts <= 256 else 4, **launch_options(x.device),
        )  # fmt: skip
    return logits, weights, ids


def _empty(num_tokens: int, routing: Routing, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    size = (num_tokens, routing.top_k)
    return torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=torch.int64, device=device)


def _constants(num_experts: int, routing: Routing) -> tuple[object, ...]:
    return (
        num_experts, triton.next_power_of_2(num_experts), routing.top_k, triton.next_power_of_2(routing.top_k),
        routing.scores, routing.normalized, routing.scale, routing.epsilon, routing.num_groups, routing.top_groups,
    )  # fmt: skip
