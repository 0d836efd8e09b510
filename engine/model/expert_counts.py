"""Counts how evenly tokens choose experts. On a GPU, counting takes a few small kernels in each layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.model.attention import row_slot_mapping_of
from engine.model.experts import NAMES, argument_names, bound, expert_modules, expert_shape
from engine.model.parallel.expert_slots import real_choices, slots_of


class ExpertCounts:
    """Counts the router's choices in the modules that hold experts, over the experts of all ranks and without padding
    tokens of CUDA graphs. num_parts: how many ranks divide whole experts. The thread that computes also counts; one
    other thread may read, which on a GPU waits for the launched steps."""

    def __init__(self, modules: list[nn.Module], num_parts: int, attention: nn.Module) -> None:
        """num_parts: how many ranks divide whole experts, so that each module holds such a part of them. attention: an
        attention module, which knows which tokens of a step are padding."""
        self._slots = [slots for module in modules if (slots := slots_of(module)) is not None]
        for one in self._slots:
            one.row_slot_mapping_of = partial(row_slot_mapping_of, attention)
        held = [expert_shape(module, NAMES[0])[0] * num_parts for module in modules]
        most = max(slots.num_experts for slots in self._slots) if self._slots else max(held)
        self.num_parts = num_parts
        device = next(modules[0].parameters()).device
        self._tokens = torch.zeros(len(modules), most, dtype=torch.int64, device=device)
        self._experts, self._ranks = _Imbalance(self.total()), _Imbalance(self._rank_totals())
        for layer, module in zip(self._tokens, modules, strict=True):
            module.register_forward_pre_hook(_count(module, layer, attention), with_kwargs=True, prepend=True)

    @classmethod
    def of(cls, model: nn.Module, num_parts: int, attention: nn.Module) -> ExpertCounts | None:
        """Start to count the choices of a model; None: it has no experts."""
        modules = [module for _, module in expert_modules(model)]
        return cls(modules, num_parts, attention) if modules else None

    def total(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_experts]: how many tokens have chosen each expert since the start."""
        return self._tokens.numpy(force=True).copy()

    def imbalance(self) -> float:
        """How many tokens chose a layer's most chosen expert, divided by the mean over its experts; the mean of all
        layers. Counts tokens since the last call; without any, returns the last result, which is 0 at first."""
        return self._experts.read(self.total())

    def rank_imbalance(self) -> float:
        """Like `imbalance`, for ranks: the choices that a layer's busiest rank computes, divided by the mean over the
        ranks."""
        return self._ranks.read(self._rank_totals())

    def _rank_totals(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_ranks]: how many choices fell to each rank since the start."""
        if self._slots:
            return np.stack([slots.rank_totals() for slots in self._slots])
        by_rank: npt.NDArray[np.int64] = self.total().reshape(len(self._tokens), self.num_parts, -1).sum(axis=2)
        return by_rank


class _Imbalance:
    """A row's largest number divided by the row's mean; the mean over all rows. Counts only what is new since the last
    read."""

    def __init__(self, total: npt.NDArray[np.int64]) -> None:
        self._read, self._last = total, 0.0

    def read(self, total: npt.NDArray[np.int64]) -> float:
        """total: [rows, columns]; must only grow."""
        new = total - self._read
        chosen = new[new.any(axis=1)]
        if len(chosen):
            self._read, self._last = total, float((chosen.max(axis=1) / chosen.mean(axis=1)).mean())
        return self._last


def _count(module: nn.Module, into: Tensor, attention: nn.Module) -> Callable[..., None]:
    names = argument_names(module)

    def count(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, ids, _ = bound(names, given, named)
        chosen = ids.long()
        into.scatter_add_(0, chosen.flatten(), real_choices(chosen, row_slot_mapping_of(attention, x)).flatten())

    return count
