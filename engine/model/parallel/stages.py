"""Which layers of a model each stage of a pipeline holds.

    first stage   embedding, layers
    between       layers
    last stage    layers, final norm, head (a copy of its own if tied)

By transformers' pipeline-parallel plan of the model (`base_model_pp_plan`). Modules that a stage does not hold are
removed from the model before memory is allocated, and are not read from the files; the other layers keep their places
and names, since models look up by a layer's number which attention or which angles it has. After vLLM's backend for
transformers models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedModel

from engine.model.errors import UnsupportedModel
from engine.model.missing_modules import MissingEmbedding, MissingLayer, MissingModule, ReceivingLayer
from engine.model.parallel.plan import own_stages

T = TypeVar("T")


class Stage(NamedTuple):
    """Stage `number`, counted from 0, of `size` stages."""

    number: int
    size: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1

    def layers(self, num_layers: int) -> range:
        """The decoder layers of the stage. All stages have equally many; left-over layers go one each to the stages
        from the last but one backwards, because the last stage has the head (as in vLLM)."""
        each, left = divmod(num_layers, self.size)
        more = range(self.size - 1 - left, self.size - 1)  # the stages with one more layer
        first = self.number * each + sum(stage < self.number for stage in more)
        return range(first, first + each + (self.number in more))

    def groups(self, groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The part of the KV groups of all layers that the stage holds, as indexes of its own layers."""
        held = self.layers(sum(map(len, groups)))
        return tuple(tuple(layer - held.start for layer in group if layer in held) for group in groups)


WHOLE = Stage(0, 1)


@dataclass(slots=True)
class StageWeights:
    """Which tensors of a checkpoint a stage holds. absent: the modules that it does not hold. renamed: tensors that it
    holds under another name."""

    absent: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def of(self, stored: Mapping[str, T], name_of: Callable[[str], str]) -> dict[str, T]:
        """The tensors that the stage holds, of those in the files. name_of: maps a name in the files to the name in the
        model, and names in the model to themselves."""
        if not self.absent:
            return dict(stored)
        names, absent = {name: name_of(name) for name in stored}, tuple(f"{name}." for name in self.absent)
        copied = {self.renamed[own]: stored[name] for name, own in names.items() if own in self.renamed}
        names |= {own: own for own in copied}
        return {name: tensor for name, tensor in {**copied, **stored}.items() if not names[name].startswith(absent)}


def keep_stage(model: PreTrainedModel, stage: Stage) -> StageWeights:
    """Replace the modules that the stage does not hold by placeholders, before the model has weights. Raises
    UnsupportedModel, which names the model, if it cannot be divided into stages."""
    weights = StageWeights()
    if stage.size == 1:
        return weights
    num_layers = model.config.get_text_config().num_hidden_layers
    if num_layers < stage.size:
        reason = f"{num_layers} layers cannot be divided among {stage.size} pipeline stages"
        raise UnsupportedModel(f"{model.config.model_type}: {reason}")
    layers, after = _planned(model, num_layers)
    names = {module: name for name, module in model.named_modules()}
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    held = stage.layers(num_layers)
    for index, layer in enumerate(layers):
        if index not in held:
            weights.absent.append(names[layer])
            layers[index] = ReceivingLayer() if index == held.start - 1 else MissingLayer()
    if not stage.is_last:
        for module in (head, after):
            weights.absent.append(names[module])
            model.set_submodule(names[module], MissingModule())
    if not stage.is_first:
        weights.absent.append(names[embedding])
        if head.weight is embedding.weight:
            weights.renamed[f"{names[embedding]}.weight"] = f"{names[head]}.weight"
        model.set_submodule(names[embedding], MissingEmbedding(embedding.embedding_dim, embedding.weight.dtype))
    return weights


def _planned(model: PreTrainedModel, num_layers: int) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers, and the norm after them, according to the plan."""
    config = model.config.get_text_config()
    plan: Mapping[str, Any] = getattr(config, "base_model_pp_plan", None) or own_stages(config.model_type)
    parts = [getattr(model.get_decoder(), name, None) for name in plan]
    named = f"{type(model).__name__} has no pipeline-parallel plan"
    if not plan:
        raise UnsupportedModel(named)
    layers, after = parts[-2:] if len(parts) > 2 else (None, None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    fits = parts[0] is embedding and isinstance(embedding, nn.Embedding) and head is not None
    if not fits or not isinstance(layers, nn.ModuleList) or len(layers) != num_layers or after is None:
        raise UnsupportedModel(f"{named} of an embedding, decoder layers and a norm")
    return layers, after
