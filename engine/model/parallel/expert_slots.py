"""The slots of a layer of experts with load balancing: which slot computes a choice, and how experts move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.model.experts import argument_names, attach_share, bound, weights_of
from engine.model.parallel.expert_placement import Placement, first_placement, moves
from engine.model.parallel.group import RankGroup

_SLOTS = "baton_expert_slots"


class ExpertSlots:
    """The slots of one layer on one rank of `group`; all ranks make the same calls. See
    `engine.model.parallel.expert_placement`.

    placement: the experts in all ranks' slots. The module's parameters have a row for each of this rank's slots. All
    tensors keep their addresses, because CUDA graphs refer to them.
    """

    def __init__(self, layer: int, module: nn.Module, group: RankGroup, num_experts: int) -> None:
        """layer: counted over layers with experts. The parameters are still in the order of `first_placement`."""
        rows = sorted(module.named_parameters(recurse=False))
        self._rows = [parameter.detach() for _, parameter in rows]
        self._layer, self._group, self.num_experts = layer, group, num_experts
        self._size = len(self._rows[0])
        self._names = argument_names(module)
        most, device = self._size * group.size - num_experts + 1, self._rows[0].device
        self._rank_tokens = torch.zeros(group.size, dtype=torch.int64, device=device)
        self.row_slot_mapping_of: Callable[[Tensor], Tensor | None] = lambda x: None
        """Maps rows x to their slot mapping: see `engine.model.attention.row_slot_mapping_of`."""
        self._slots = torch.zeros(num_experts, most, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._place(first_placement(num_experts, self._size * group.size, group.size))

    @property
    def num_ranks(self) -> int:
        return self._group.size

    @torch.inference_mode()
    def rearrange(self, placement: Placement) -> None:
        """Move experts so that the slots hold this placement. Takes as long as the ranks need to exchange the weights;
        meanwhile, a rank needs memory for those that it receives. Raises RuntimeError when a rank is lost."""
        size, rank = self._size, self._group.rank
        sends, taken = [], []
        # All ranks make the moves in the same order, since the first send to a rank waits until that rank receives.
        for source, target in moves(self.placement, placement, self.num_ranks):
            if target // size == rank:
                taken.append((target % size, self._take(source)))
            elif source // size == rank:
                sends += [self._group.send(rows[source % size], target // size) for rows in self._rows]
        for wait in sends:  # the rows must not change before they are sent
            wait()
        for own, values in taken:
            for rows, value in zip(self._rows, values, strict=True):
                rows[own].copy_(value)
        self._place(placement)

    def _take(self, slot: int) -> list[Tensor]:
        """The parameters of a slot; if the slot is another rank's, that rank sends them."""
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
        """[num_ranks]: how many choices fell to each rank since the start. Any thread may call this; on a GPU, it waits
        for the launched steps."""
        return self._rank_tokens.numpy(force=True).copy()

    def choose(self, ids: Tensor) -> Tensor:
        """The slots, counted over all ranks, that compute the chosen experts; the same on all ranks. An expert's
        replicas take turns, and each layer begins with another replica. ids: [num_tokens, top_k], the experts that
        tokens chose."""
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
        """A forward pre-hook: turns ids of experts into this rank's slots, counted from 0. Choices that fall on other
        ranks' slots become `_size`, which is no expert."""
        x, ids, weights = bound(self._names, given, named)
        slots = self.choose(ids)
        ranks = (slots // self._size).flatten()
        self._rank_tokens.scatter_add_(0, ranks, real_choices(slots, self.row_slot_mapping_of(x)).flatten())
        own = slots - self._group.rank * self._size
        own = own.masked_fill((own < 0) | (own >= self._size), self._size)
        return (x, own.to(ids.dtype), weights), {}


def real_choices(ids: Tensor, row_slot_mapping: Tensor | None) -> Tensor:
    """[num_rows, top_k], like `ids`: 1 for each choice, but 0 for those of padding rows (slot 0)."""
    return (
        torch.ones_like(ids)
        if row_slot_mapping is None
        else (row_slot_mapping > 0).to(ids.dtype)[:, None].expand_as(ids)
    )


def connect_slots(layer: int, module: nn.Module, group: RankGroup, num_redundant: int) -> None:
    """Make a module of experts compute the choices that fall on this rank's slots. The rank must have read the weights
    of its experts in `first_placement`. num_redundant: how many more slots than experts all ranks have together."""
    of = weights_of(module)
    assert of is not None
    attach_share(module, of, group.size)
    slots = ExpertSlots(layer, module, group, of.num_experts * group.size - num_redundant)
    module.__dict__[_SLOTS] = slots
    module.register_forward_pre_hook(slots.own_choices, with_kwargs=True)


def slots_of(module: nn.Module) -> ExpertSlots | None:
    """The module's slots; None if its experts do not move."""
    return module.__dict__.get(_SLOTS)


def expert_slots(model: nn.Module) -> list[ExpertSlots]:
    """The slots of all layers, in order."""
    return [slots for module in model.modules() if (slots := slots_of(module)) is not None]
