"""How many experts a decode step reads: which ones tokens choose depends on the weights, and so does the floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine.bench import Bench, step
from engine.model.experts import argument_names, bound, expert_modules


class ChosenExperts:
    """Of the steps while `counting`. Padding of a CUDA graph counts, too: measure batches that have graphs."""

    def __init__(self, bench: Bench, tokens: Tensor) -> None:
        """tokens: [num_layers, num_experts], how many have chosen each expert."""
        self._bench, self._tokens = bench, tokens

    def mean(self, num_steps: int) -> float:
        """Distinct experts of a layer that a step of what runs reads: the mean of the layers of so many steps."""
        counts = []
        for _ in range(num_steps):
            self._tokens.zero_()
            step(self._bench.engine)
            if self._tokens.is_cuda:
                torch.cuda.synchronize()  # the engine is a step ahead
            counts.append(float((self._tokens > 0).sum(1).float().mean()))
        return statistics.fmean(counts)


@contextmanager
def counting(bench: Bench) -> Iterator[ChosenExperts]:
    """Meanwhile there are other CUDA graphs, which count. Those without are kept: captured anew, they would be slower
    (docs/performance.md has the reason)."""
    rank = bench.built.runner.rank
    graphs = rank.graphs
    modules = [module for _, module in expert_modules(bench.built.runner.model)]
    assert bench.shape.experts is not None
    tokens = torch.zeros(len(modules), bench.shape.experts.num_experts, dtype=torch.int64, device=bench.built.device)
    hooks = [
        module.register_forward_pre_hook(_count(module, layer), with_kwargs=True, prepend=True)
        for module, layer in zip(modules, tokens, strict=True)
    ]
    try:
        bench.built.warm_up()
        yield ChosenExperts(bench, tokens)
    finally:
        for hook in hooks:
            hook.remove()
        rank.graphs = graphs


def _count(module: nn.Module, into: Tensor) -> Callable[..., None]:
    names = argument_names(module)

    def count(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen = bound(names, given, named)[1].long().flatten()
        into.scatter_add_(0, chosen, torch.ones_like(chosen))

    return count
