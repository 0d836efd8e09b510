"""The slots of a layer of experts with load balancing: which slot computes a choice, and how experts move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.model.experts import argument_names, attach, bound, weights_of
from engine.model.parallel.expert_placement import Placement, first_placement, moves
from engine.model.parallel.group import RankGroup

_SLOTS = "baton_expert_slots"


class ExpertSlots:
    """One layer's, on one rank of `group`; all ranks make the same calls. See `engine.model.parallel.expert_placement`.

    placement: of all ranks' slots. The module's parameters have a row for each of the rank's own slots. They and all
    other tensors keep their memory, which CUDA graphs know.
    """

    def __init__(self, layer: int, module: nn.Module, group: RankGroup, num_experts: int) -> None:
        """layer: counted over layers with experts. The parameters are as they were read (`first_placement`)."""
        rows = sorted(module.named_parameters(recurse=False))
        self._rows = [parameter.detach() for _, parameter in rows]
        self._layer, self._group, self.num_experts = layer, group, num_experts
        self._size = len(self._rows[0])
        self._names = argument_names(module)
        most, device = self._size * group.size - num_experts + 1, self._rows[0].device
        self._rank_tokens = torch.zeros(group.size, dtype=torch.int64, device=device)
        self.row_slot_mapping_of: Callable[[Tensor], Tensor | None] = lambda x: None
        """Of rows x: see `engine.model.attention.row_slot_mapping_of`."""
        self._slots = torch.zeros(num_experts, most, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._place(first_placement(num_experts, self._size * group.size, group.size))

    @property
    def num_ranks(self) -> int:
        return self._group.size

    @torch.inference_mode()
    def rearrange(self, placement: Placement) -> None:
        """Let the slots hold these experts from now on. Takes as long as the ranks need to exchange the weights of
        those that move; a rank holds those that it gets twice meanwhile. Raises RuntimeError when a rank is lost."""
        size, rank = self._size, self._group.rank
        sends, taken = [], []
        # All ranks go through the moves in one order, since a first send to another rank waits for it to receive.
        for source, target in moves(self.placement, placement, self.num_ranks):
            if target // size == rank:
                taken.append((target % size, self._take(source)))
            elif source // size == rank:
                sends += [self._group.send(rows[source % size], target // size) for rows in self._rows]
        for wait in sends:  # until then the rows must not change
            wait()
        for own, values in taken:
            for rows, value in zip(self._rows, values, strict=True):
                rows[own].copy_(value)
        self._place(placement)

    def _take(self, slot: int) -> list[Tensor]:
        """The parameters of a slot, which its rank sends if it is another."""
        rank, own = divmod(slot, self._size)
        if rank == self._group.rank:
            return [rows[own].clone() for rows in self._rows]
        values = [rows.new_empty(rows.shape[1:]) for rows in self._rows]  # contiguous, which rows need not be
        for value in values:
            self._group.receive(value, rank)
        return values

    def _place(self, placement: Placement) -> None:
        self.placement = placement.astype(np.int32)
        counts = np.bincount(placement, minlength=self.num_experts)
        slots = np.zeros(self._slots.shape, np.int64)
        for expert in range(self.num_experts):
            slots[expert, : counts[expert]] = np.flatnonzero(placement == expert)
        self._slots.copy_(torch.from_numpy(slots))
        self._counts.copy_(torch.from_numpy(counts))

    def rank_totals(self) -> npt.NDArray[np.int64]:
        """[num_ranks]: how many choices each rank was to compute since the start. On any thread; on a GPU it waits for
        the steps that were launched."""
        return self._rank_tokens.numpy(force=True).copy()

    def choose(self, ids: Tensor) -> Tensor:
        """For experts that tokens chose, [num_tokens, top_k], the slots that compute them, of all ranks, the same on
        all ranks: an expert's replicas take turns, each layer beginning with another one."""
        ids = ids.long()
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        numbers = torch.zeros_like(self._counts).scatter_add_(0, chosen, torch.ones_like(chosen))
        turns = torch.empty_like(chosen)  # 0, 1, ... among the choices of the same expert
        turns[order] = torch.arange(len(chosen), device=ids.device) - (numbers.cumsum(0) - numbers)[chosen[order]]
        return self._slots[ids, (turns.view_as(ids) + self._layer) % self._counts[ids]]

    def own_choices(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook: ids of experts become the rank's slots, counted from 0; choices of other ranks' slots
        become `_size`, no expert."""
        x, ids, weights = bound(self._names, given, named)
        slots = self.choose(ids)
        ranks = (slots // self._size).flatten()
        self._rank_tokens.scatter_add_(0, ranks, real_choices(slots, self.row_slot_mapping_of(x)).flatten())
        own = slots - self._group.rank * self._size
        own = own.masked_fill((own < 0) | (own >= self._size), self._size)
        return (x, own.to(ids.dtype), weights), {}


def real_choices(ids: Tensor, row_slot_mapping: Tensor | None) -> Tensor:
    """For what rows chose, [num_rows, top_k]: 1, and 0 where a row is padding, by its slot."""
    return (
        torch.ones_like(ids)
        if row_slot_mapping is None
        else (row_slot_mapping > 0).to(ids.dtype)[:, None].expand_as(ids)
    )


def connect_slots(layer: int, module: nn.Module, group: RankGroup, num_redundant: int) -> None:
    """Have experts with their weights, of which the rank has read `first_placement`'s, compute the choices that fall on
    the rank's slots. num_redundant: slots of all ranks beyond one for each expert."""
    of = weights_of(module)
    assert of is not None
    attach(module, of)
    module.num_experts = of.num_experts  # type: ignore[assignment] # as transformers' forward reads it
    slots = ExpertSlots(layer, module, group, of.num_experts * group.size - num_redundant)
    module.__dict__[_SLOTS] = slots
    module.register_forward_pre_hook(slots.own_choices, with_kwargs=True)


def slots_of(module: nn.Module) -> ExpertSlots | None:
    """None: the module's experts do not change places."""
    return module.__dict__.get(_SLOTS)


def expert_slots(model: nn.Module) -> list[ExpertSlots]:
    """Of all layers, in their order."""
    return [slots for module in model.modules() if (slots := slots_of(module)) is not None]
