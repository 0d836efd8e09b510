"""Routed experts divided among ranks: each rank holds a part of every expert, or some experts as a whole.

    a part of every expert       rows of gate and up, columns of down: a rank's results are partial sums
    whole experts (`whole`)      a rank computes the choices of its own experts; other choices add nothing

Every rank holds the whole router. A layer's router, experts and shared experts form one block, whose results are
all-reduced once, at its end. After vLLM's `--enable-expert-parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.experts import ExpertWeights
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, argument_names, attach, attach_share, bound, is_transposed, weights_of, why_not
from engine.model.parallel.cut import Cut
from engine.model.parallel.data_parallel import DataParallel
from engine.model.parallel.expert_placement import first_expert
from engine.model.parallel.group import RankGroup
from engine.model.tolerance import Tolerance, close, rounding

FLAG = "--enable-expert-parallel"
_REDUNDANT = "--eplb-config: num_redundant_experts"
_UNDIVIDED = "its experts cannot be divided among ranks"
_ROUNDINGS = 4
_SUM = "baton_block_sum"
_BIASES = tuple(f"{name}_bias" for name in NAMES)


def expert_cuts(
    name: str,
    module: nn.Module,
    rank: int,
    size: int,
    *,
    whole: bool,
    num_redundant: int | None = None,
    block: int = 1,
) -> dict[str, Cut]:
    """The part that a rank holds of each of the module's parameters, by name; parameters that are not listed are whole.
    name: the module's. num_redundant: for whole experts that may move, see `connect_slots`. block: see
    `Quantization.expert_block`. Raises UnsupportedModel."""
    reason, of = why_not(module), weights_of(module)
    shapes = {own: tuple(parameter.shape) for own, parameter in module.named_parameters(recurse=False)}
    if reason is None and (unknown := sorted(shapes.keys() - {*NAMES, *_BIASES})):
        reason = f"they have {unknown[0]}"
    if reason is not None or of is None:
        raise UnsupportedModel(f"{name}: these experts cannot be divided among ranks: {reason}")
    if whole:
        first, end = (
            _equal_part(of.num_experts, rank, size, f"{FLAG}: {name}", "experts")
            if num_redundant is None
            else _slots(name, of.num_experts, num_redundant, rank, size)
        )
        return {own: Cut(0, ((first, end),), shape) for own, shape in shapes.items()}
    first, end = _features(of.intermediate_size, block, rank, size, name)
    rows, columns = (2, 1) if is_transposed(module) else (1, 2)
    width = of.intermediate_size
    gate_up = ((2 * first, 2 * end),) if of.interleaved else ((first, end), (width + first, width + end))
    cuts = {own: Cut(dim, gate_up, shapes[own]) for own, dim in ((NAMES[0], rows), (_BIASES[0], 1)) if own in shapes}
    return cuts | {NAMES[1]: Cut(columns, ((first, end),), shapes[NAMES[1]])}


def _features(number: int, block: int, rank: int, size: int, name: str) -> tuple[int, int]:
    """How each expert is divided. Blocks that cannot be divided equally are divided as evenly as possible: 6 among 4
    ranks as 1, 2, 1, 2."""
    hint = f"features of each expert ({FLAG} divides whole experts)"
    if block == 1 or number % block or number % (block * size) == 0:
        return _equal_part(number, rank, size, name, hint)
    num_blocks = number // block
    if num_blocks < size:
        raise UnsupportedModel(f"{name}: {number} {hint} in blocks of {block} cannot be divided among {size} ranks")
    first, end = (num_blocks * one // size * block for one in (rank, rank + 1))
    return first, end


def _equal_part(number: int, rank: int, size: int, name: str, what: str) -> tuple[int, int]:
    part, rest = divmod(number, size)
    if rest:
        raise UnsupportedModel(f"{name}: {number} {what} cannot be divided among {size} ranks")
    return rank * part, (rank + 1) * part


def _slots(name: str, num_experts: int, num_redundant: int, rank: int, size: int) -> tuple[int, int]:
    """The range of experts that the rank's slots hold at first."""
    what = f"experts and {num_redundant} redundant ones"
    own = (num_experts + num_redundant) // size
    if own * size != num_experts + num_redundant:
        raise UnsupportedModel(f"{_REDUNDANT}: {name}: {num_experts} {what} cannot be divided among {size} ranks")
    if own > num_experts:
        raise UnsupportedModel(f"{_REDUNDANT}: {name}: {num_experts} {what} are more than one of each on {size} ranks")
    first = first_expert(num_experts, own * size, size, rank)
    return first, first + own


def connect_experts(module: nn.Module, group: RankGroup, *, whole: bool) -> None:
    """Make a module of experts, with its weights loaded, compute this rank's part."""
    of = weights_of(module)
    assert of is not None
    if whole:
        attach_share(module, of, group.size)
        module.register_forward_pre_hook(_own_choices(module, of, group), with_kwargs=True)
        return
    attach(module, of)
    if of.down_bias is not None and group.rank:
        of.down_bias.zero_()  # only rank 0 adds it to the sum


def _own_choices(
    module: nn.Module, of: ExpertWeights, group: RankGroup
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A forward pre-hook that numbers this rank's experts from 0, and turns choices of other ranks' experts into
    `num_experts`, which is no expert. It is one kernel: every layer of every decode step waits for it."""
    names, number = argument_names(module), of.num_experts
    own_ids = torch.full((number * group.size,), number, dtype=torch.int64)
    own_ids[group.rank * number :][:number] = torch.arange(number)
    own_ids = own_ids.to(of.gate_up.device)

    def own(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, ids, weights = bound(names, given, named)
        return (x, own_ids[ids], weights), {}

    return own


def sum_block(name: str, block: nn.Module, parts: Sequence[nn.Module], x: Tensor, ranks: DataParallel) -> None:
    """Patch the block's forward: gather the rows of all nodes, compute this rank's share, and all-reduce once at the
    end instead of after each of `parts`. x: [1, num_tokens, hidden_size], an input on which to compare the two; the
    same on all ranks. Raises UnsupportedModel for a block that does more with the parts' results than add them up."""
    inner: Callable[..., Any] = block.forward
    summed = BlockSum(inner, ranks)
    try:
        same = close(_first(summed.forward(x)), _each_summed(inner, x, parts, ranks.everyone), _sums_rounded(x.dtype))
    except TypeError as error:
        raise UnsupportedModel(f"{name}: {_UNDIVIDED}: it takes more than hidden states: {error}") from error
    if not same:
        raise UnsupportedModel(f"{name}: {_UNDIVIDED}: it does not just add them up")
    block.forward = summed.forward
    block.__dict__[_SUM] = summed


class BlockSum:
    """A block's forward with the all-reduce at its end. inner: without. sums: by which the norm after the block may sum
    its results; None: it cannot."""

    def __init__(self, inner: Callable[..., Any], ranks: DataParallel) -> None:
        self._inner, self._ranks = inner, ranks
        self.sums = ranks.norm_sums

    @staticmethod
    def of(block: nn.Module) -> BlockSum | None:
        """That of a block whose forward is still `forward`."""
        found: BlockSum | None = block.__dict__.get(_SUM)
        return found if found is not None and block.forward == found.forward else None

    def forward(self, x: Tensor) -> Any:
        result = self._inner(self._ranks.gather(x))
        if isinstance(result, tuple):
            return self._ranks.sum_own(result[0]), *result[1:]
        return self._ranks.sum_own(result)

    def forward_for_norm(self, x: Tensor) -> Any:
        """With this rank's partial results, if the next norm sums them (`RankGroup.norms_sum`); else `forward`."""
        assert self.sums is not None
        if self.sums.norms_sum(x.numel() // x.shape[-1], x.shape[-1] * x.itemsize):
            return self._inner(x)
        return self.forward(x)


def _sums_rounded(dtype: torch.dtype) -> Tolerance:
    """The tolerance of sums over ranks that are rounded in another order."""
    product = rounding(dtype)
    return replace(product, product=_ROUNDINGS * product.product)


def _each_summed(inner: Callable[..., Any], x: Tensor, parts: Sequence[nn.Module], group: RankGroup) -> Tensor:
    """The block's result with an all-reduce after each part."""
    own = [part.forward for part in parts]

    def summed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, **named: group.all_reduce(forward(*given, **named))

    for part, forward in zip(parts, own, strict=True):
        part.forward = summed(forward)
    try:
        return _first(inner(x))
    finally:
        for part, forward in zip(parts, own, strict=True):
            part.forward = forward


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found
