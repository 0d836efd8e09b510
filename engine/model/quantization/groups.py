"""Weights of 4 and 8 bits whose columns share scales in groups, in order or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.quantized_linear import QuantizedWeight, pack_halves, packed_columns
from engine.model.errors import UnsupportedModel
from engine.model.parallel.experts import FLAG
from engine.model.parallel.group import RankGroup

_RUN = 32
"""The fewest columns that may share a scale in the kernels."""
_HINT = f" among ranks ({FLAG} divides whole experts)"


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """codes: uint8, [out_features, in_features]. scale: [out_features, num_groups]. zero: uint8, like scale: the codes
    that stand for 0; None: half of the number of codes. group: how many columns share a scale, of which a rank may have
    fewer; 0: all."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    bits: int

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def quantized(self) -> QuantizedWeight:
        scale, zero, group = self.scale.contiguous(), self.zero, min(self.group, self.codes.shape[1])
        if self.bits == 4:
            values = pack_halves(self.codes, packed_columns(self.codes.shape[1], group))
            return QuantizedWeight(values, scale, None if zero is None else zero.contiguous(), group)
        centred = None if zero is None else (zero.int() - self.middle).to(torch.int8).contiguous()
        return QuantizedWeight((self.codes.int() - self.middle).to(torch.int8).contiguous(), scale, centred, group)

    def by_group(self, name: str, groups: Tensor, others: RankGroup) -> tuple[GroupedCodes, Tensor | None]:
        """The same weight with the columns of each group adjacent, and for each column its place in this one (see
        `QuantizedLinear`); None: they are adjacent already.

        groups: the group of each column. others: the ranks that hold the other columns. If `scale` has the groups of
        all columns, these ranks may have any columns of a group. Raises UnsupportedModel.
        """
        groups, size = groups.long(), min(self.group, groups.numel())
        num, first, num_groups = groups.numel() // size, int(groups[0]), self.scale.shape[1]
        are_in_order = num * size == groups.numel() and torch.equal(
            groups, torch.arange(groups.numel(), device=groups.device) // size + first
        )
        if num_groups > num:
            if groups.min() < 0 or groups.max() >= num_groups:
                raise UnsupportedModel(f"{name}: its columns are of more than {num_groups} groups (g_idx)")
            own = torch.arange(first, first + num, device=groups.device)
            return (self._of(own), None) if are_in_order else self._in_runs(groups)
        before = range(others.rank * (num - 1), others.rank * (num + 1) + 1)  # others may have one more or less
        if are_in_order and first in before:
            return self, None
        if others.size > 1:
            raise UnsupportedModel(f"{name}: columns in another order than their groups cannot be divided{_HINT}")
        if (groups < 0).any() or groups.bincount(minlength=num).tolist() != [size] * num:
            raise UnsupportedModel(f"{name}: groups of unequal sizes (g_idx) cannot be run")
        order = groups.argsort(stable=True)
        return replace(self, codes=self.codes.index_select(1, order)), order

    def _of(self, groups: Tensor) -> GroupedCodes:
        """These codes with the scales and zeros of these groups."""
        zero = None if self.zero is None else self.zero.index_select(1, groups)
        return replace(self, scale=self.scale.index_select(1, groups), zero=zero)

    def _in_runs(self, groups: Tensor) -> tuple[GroupedCodes, Tensor]:
        """Groups of unequal sizes become runs of `_RUN` columns, the last of a group with columns of zeros, which
        multiply column 0. The number of runs is even, so that steps of the kernels have two."""
        counts = groups.bincount(minlength=self.scale.shape[1])
        runs = (counts + _RUN - 1) // _RUN
        runs[-1] += runs.sum() % 2
        of_runs = torch.arange(len(runs), device=groups.device).repeat_interleave(runs)
        order = groups.argsort(stable=True)
        shifts = (runs.cumsum(0) - runs) * _RUN - (counts.cumsum(0) - counts)
        places = torch.arange(len(order), device=groups.device) + shifts[groups[order]]
        columns = torch.zeros(len(of_runs) * _RUN, dtype=torch.int64, device=groups.device)
        columns[places] = order
        padded = self._of(of_runs)
        nothing = torch.full_like(padded.scale, self.middle, dtype=torch.uint8) if padded.zero is None else padded.zero
        codes = nothing.repeat_interleave(_RUN, 1)
        codes[:, places] = self.codes[:, order]
        return replace(padded, codes=codes, group=_RUN), columns
