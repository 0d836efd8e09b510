"""How evenly tokens choose experts, counted where it costs next to nothing: on a CPU. On a GPU it would be one more
kernel in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from engine.model.experts import NAMES, argument_names, expert_modules, expert_shape
from engine.model.parallel.expert_slots import slots_of


class ExpertCounts:
    """tokens: [num_layers, num_experts] int64, how many chose each expert since the start, as the router chose: of the
    experts of all ranks. num_parts: ranks that have whole experts. The thread that computes counts; any one other may
    read."""

    def __init__(self, modules: list[nn.Module], num_parts: int) -> None:
        """num_parts: ranks among which whole experts are divided, so that each module has a part of them."""
        self._slots = [slots for module in modules if (slots := slots_of(module)) is not None]
        held = [expert_shape(module, NAMES[0])[0] * num_parts for module in modules]
        most = max(slots.num_experts for slots in self._slots) if self._slots else max(held)
        self.num_parts = num_parts
        self.tokens = np.zeros((len(modules), most), np.int64)
        self._experts, self._ranks = _Imbalance(self.tokens), _Imbalance(self._rank_tokens())
        for layer, module in zip(self.tokens, modules, strict=True):
            module.register_forward_pre_hook(_count(module, layer), with_kwargs=True, prepend=True)

    @classmethod
    def of(cls, model: nn.Module, num_parts: int) -> ExpertCounts | None:
        """Of the model as it is served, from now on; None: it has no experts, or is on a GPU."""
        modules = [module for _, module in expert_modules(model)]
        if not modules or any(parameter.is_cuda for parameter in modules[0].parameters()):
            return None
        return cls(modules, num_parts)

    def imbalance(self) -> float:
        """Of the tokens since the last call: those of a layer's most chosen expert over the mean of its experts; the
        mean of all layers. Without any, what it said before; 0 at first."""
        return self._experts.read(self.tokens)

    def rank_imbalance(self) -> float:
        """Likewise of the choices that ranks compute: those of a layer's busiest rank over the mean of its ranks."""
        return self._ranks.read(self._rank_tokens())

    def _rank_tokens(self) -> npt.NDArray[np.int64]:
        """[num_layers, num_ranks], since the start."""
        if self._slots:
            return np.stack([slots.rank_tokens for slots in self._slots])
        by_rank: npt.NDArray[np.int64] = self.tokens.reshape(len(self.tokens), self.num_parts, -1).sum(axis=2)
        return by_rank


class _Imbalance:
    """The largest number of a row over its mean; the mean of all rows. Of what is new since it was last read."""

    def __init__(self, total: npt.NDArray[np.int64]) -> None:
        self._read, self._last = total.copy(), 0.0

    def read(self, total: npt.NDArray[np.int64]) -> float:
        """total: [rows, columns], which only grows."""
        now = total.copy()
        new = now - self._read
        chosen = new[new.any(axis=1)]
        if len(chosen):
            self._read, self._last = now, float((chosen.max(axis=1) / chosen.mean(axis=1)).mean())
        return self._last


def _count(module: nn.Module, into: npt.NDArray[np.int64]) -> Callable[..., None]:
    names = argument_names(module)

    def count(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = given[1] if len(given) > 1 else named[names[1]]
        into[:] += np.bincount(ids.flatten().numpy(), minlength=len(into))

    return count
