"""Which tensor of the model each stored tensor fills, following transformers' conversions for the model's class.

Renamed tensors keep their values. Experts that are stored one by one become slices of one tensor for all experts, gate
before up; also those of a class whose own files have that one tensor (Qwen3-VL-MoE), since tools that quantize write
layers. Other conversions are left to transformers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_modules, is_transposed
from engine.model.parallel.cut import Cut
from engine.model.safetensors_index import StoredTensor

QUANTIZED = (
    *("weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
"""Last parts of the names of quantized weights' tensors, where other weights have "weight"."""

_LAYERS_OF_EXPERT = {"gate_proj": (NAMES[0], 0, 2), "up_proj": (NAMES[0], 1, 2), "down_proj": (NAMES[1], 0, 1)}
"""The model's tensor that has the weight, which of its parts that is, and of how many."""


class NotDirect(Exception):
    """This checkpoint cannot be loaded by just copying its tensors; the text says why."""


class Place(NamedTuple):
    """The place of a stored tensor in the model: a tensor, by name. With `expert`, a slice of a tensor that has an
    expert in each row of its first dimension: part `part` of the expert's `num_parts` equal parts, which are
    concatenated along the next dimension."""

    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1

    def stored_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor, if the model's tensor has the shape `whole`."""
        if self.expert is None:
            return whole
        _, rows, *columns = whole
        return (rows // self.num_parts, *columns)

    def is_in(self, cut: Cut | None) -> bool:
        """Whether that part of the model's tensor contains any of the stored tensor. None: the whole tensor."""
        return cut is None or self.expert is None or cut.dim > 0 or cut.spans[0][0] <= self.expert < cut.spans[0][1]

    def cut(self, cut: Cut | None) -> Cut | None:
        """The part of the stored tensor that is in that part of the model's tensor; None: all of it."""
        if cut is None or self.expert is None:
            return cut
        if cut.dim == 0:
            return None
        shape = self.stored_shape(cut.whole)
        spans = cut.spans
        if cut.dim == 1 and self.num_parts > 1:
            if len(spans) != self.num_parts:
                raise UnsupportedModel(f"{self.name}: {self.num_parts} parts of an expert cannot be divided so")
            first, end = (index - self.part * shape[0] for index in spans[self.part])
            spans = ((first, end),)
        return Cut(cut.dim - 1, spans, shape)

    def slices(self, cut: Cut | None, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Where the stored tensor goes in the part `cut` of the model's tensor, which has the shape `shape`."""
        if self.expert is None:
            return ()
        first = cut.spans[0][0] if cut is not None and cut.dim == 0 else 0
        rows = shape[1] // self.num_parts
        return self.expert - first, slice(self.part * rows, (self.part + 1) * rows)


class Placing:
    """Finds the places of stored tensors in one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms: Sequence[Any] = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._others = [one for one in transforms if not isinstance(one, WeightRenaming)]
        self._stacked = {
            name
            for name, module in expert_modules(model)
            if getattr(module, "is_concatenated", False) and not is_transposed(module)
        }

    def of(self, stored: str) -> Place:
        """The place of the stored tensor of that name. The tensors of an expert's quantized weight are placed like the
        weight, each in a tensor that is named after the weight and itself. Raises NotDirect."""
        layer, _, kind = stored.rpartition(".")
        if kind in QUANTIZED and (weight := self._of(f"{layer}.weight")).expert is not None:
            return weight._replace(name=f"{weight.name}_{kind}")
        return self._of(stored)

    def name_of(self, stored: str) -> str:
        """The name in the model of what that stored tensor fills; its own if transformers converts it."""
        try:
            return self.of(stored).name
        except NotDirect:
            return stored

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
        return self._of_stacked(name) or Place(name)

    def _of_stacked(self, name: str) -> Place | None:
        """The place of an expert's weight of which transformers knows no conversion; None: it is none."""
        found = re.fullmatch(r"(.+)\.(\d+)\.(\w+)\.weight", name)
        if found is None or found[1] not in self._stacked or found[3] not in _LAYERS_OF_EXPERT:
            return None
        target, part, num_parts = _LAYERS_OF_EXPERT[found[3]]
        return Place(f"{found[1]}.{target}", int(found[2]), part, num_parts)


def with_model_names(stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> dict[str, StoredTensor]:
    """The stored tensors by their own names, and also by those that they have in the model. Experts' have only their
    own."""
    placing, found = Placing(model), dict(stored)
    for name, tensor in stored.items():
        with contextlib.suppress(NotDirect):
            place = placing.of(name)
            if place.expert is None:
                found[place.name] = tensor
    return found


def _expert_place(converter: Any, pattern: str, name: str, target: str) -> Place | None:
    """The place of an expert's tensor; None: the converter does more than stack experts."""
    if not isinstance(converter, WeightConverter):
        return None
    sources, steps = converter.source_patterns, [(type(step), vars(step)) for step in converter.operations]
    merge, join = (MergeModulelist, {"dim": 0}), (Concatenate, {"dim": 1, "num_shards_attribute": None})
    expert = re.search(re.escape(pattern).replace(r"\*", r"(\d+)") + r"$", name)
    if steps != [merge, join][: 1 if len(sources) == 1 else 2] or len(converter.target_patterns) != 1 or expert is None:
        return None
    return Place(target, int(expert[1]), sources.index(pattern), len(sources))
