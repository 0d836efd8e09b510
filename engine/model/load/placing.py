"""Which tensor of the model each stored one fills, by transformers' conversions for the model's class.

Renamed tensors keep their values. Experts that are stored one by one become slices of one tensor for all of them, those
of gate before those of up. Other conversions are left to transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from engine.model.errors import UnsupportedModel
from engine.model.parallel.cut import Cut

QUANTIZED = (
    *("weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
"""What the names of tensors of quantized weights end with, where those of others have "weight"."""


class NotDirect(Exception):
    """Loading this checkpoint takes more than copying its tensors."""


class Place(NamedTuple):
    """A tensor of the model, by name; or of one with an expert in each row of its first dimension, `part` of the
    expert's `num_parts` equal parts, which follow each other along the next dimension."""

    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1

    def stored_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored tensor, if the model's has that shape."""
        if self.expert is None:
            return whole
        _, rows, *columns = whole
        return (rows // self.num_parts, *columns)

    def is_in(self, cut: Cut | None) -> bool:
        """Whether something of the stored tensor is in that part of the model's; None: all of it."""
        return cut is None or self.expert is None or cut.dim > 0 or cut.first <= self.expert < cut.end

    def cut(self, cut: Cut | None) -> Cut | None:
        """What is in that part; None: all of it."""
        if cut is None or self.expert is None:
            return cut
        if cut.dim == 0:
            return None
        shape = self.stored_shape(cut.whole)
        if cut.dim == 1 and cut.sections != self.num_parts:
            raise UnsupportedModel(f"{self.name}: {self.num_parts} parts of an expert cannot be divided so")
        return Cut(cut.dim - 1, cut.first, cut.end, shape)

    def slices(self, cut: Cut | None, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Where it goes in the model's tensor, which is `cut`, and has that shape."""
        if self.expert is None:
            return ()
        first = cut.first if cut is not None and cut.dim == 0 else 0
        rows = shape[1] // self.num_parts
        return self.expert - first, slice(self.part * rows, (self.part + 1) * rows)


class Placing:
    """Of one model's class."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms: Sequence[Any] = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._others = [one for one in transforms if not isinstance(one, WeightRenaming)]

    def of(self, stored: str) -> Place:
        """Of the stored tensor of that name. What files have of an expert's quantized weight is placed like the weight,
        in a tensor that has its own name after the weight's. Raises NotDirect."""
        layer, _, kind = stored.rpartition(".")
        if kind in QUANTIZED and (weight := self._of(f"{layer}.weight")).expert is not None:
            return weight._replace(name=f"{weight.name}_{kind}")
        return self._of(stored)

    def _of(self, stored: str) -> Place:
        name = stored
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for other in self._others:
            target, pattern = other.rename_source_key(name)
            if pattern is not None:
                place = _expert_place(other, pattern, name, target)
                if place is None:
                    raise NotDirect(f"transformers converts {stored}")
                return place
        return Place(name)


def _expert_place(converter: Any, pattern: str, name: str, target: str) -> Place | None:
    """None: it does more than to put experts together."""
    if not isinstance(converter, WeightConverter):
        return None
    sources, steps = converter.source_patterns, [(type(step), vars(step)) for step in converter.operations]
    merge, join = (MergeModulelist, {"dim": 0}), (Concatenate, {"dim": 1, "num_shards_attribute": None})
    expert = re.search(re.escape(pattern).replace(r"\*", r"(\d+)") + r"$", name)
    if steps != [merge, join][: 1 if len(sources) == 1 else 2] or len(converter.target_patterns) != 1 or expert is None:
        return None
    return Place(target, int(expert[1]), sources.index(pattern), len(sources))
