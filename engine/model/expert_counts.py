"""How evenly tokens choose experts. To count costs a GPU a few small kernels in each layer."""

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
    """Counts where the experts are, as their router chooses: among the experts of all ranks, and without tokens that
    pad a CUDA graph. num_parts: ranks that have whole experts. The thread that computes counts; any one other may read,
    which on a GPU waits for the steps that were launched."""

    def __init__(self, modules: list[nn.Module], num_parts: int, attention: nn.Module) -> None:
        """num_parts: ranks among which whole experts are divided, so that each module has a part of them. attention: a
        module that knows which tokens of a step are padding."""
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
        """Of the model as it is served, from now on; None: it has no experts."""
        modules = [module for _, module in expert_modules(model)]
        return cls(modules, num_parts, attention) if modules else None

    def total(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_experts]: how many tokens have chosen each expert since the start."""
        return self._tokens.numpy(force=True).copy()

    def imbalance(self) -> float:
        """Of the tokens since the last call: those of a layer's most chosen expert over the mean of its experts; the
        mean of all layers. Without any, what it said before; 0 at first."""
        return self._experts.read(self.total())

    def rank_imbalance(self) -> float:
        """Likewise of the choices that ranks compute: those of a layer's busiest rank over the mean of its ranks."""
        return self._ranks.read(self._rank_totals())

    def _rank_totals(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_ranks], since the start."""
        if self._slots:
            return np.stack([slots.rank_totals() for slots in self._slots])
        by_rank: npt.NDArray[np.int64] = self.total().reshape(len(self._tokens), self.num_parts, -1).sum(axis=2)
        return by_rank


class _Imbalance:
    """The largest number of a row over its mean; the mean of all rows. Of what is new since it was last read."""

    def __init__(self, total: npt.NDArray[np.int64]) -> None:
        self._read, self._last = total, 0.0

    def read(self, total: npt.NDArray[np.int64]) -> float:
        """total: [rows, columns], which only grows."""
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
