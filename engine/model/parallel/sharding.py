"""Which part of a model each rank holds, by transformers' tensor-parallel plan of the model.

    q, k, v, gate, up    some of the outputs (whole heads); a KV head is on several ranks if there are fewer than ranks
    o, down              some of the inputs: each rank's product is a part of the sum
    embedding, head      some of the vocabulary
    the rest             whole, on every rank

Plans: `base_model_tp_plan` in transformers' configurations; the head and the embedding are always divided. The sums and
gathers are in `engine.model.parallel.layers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from baton.layout import KvSlice
from engine.model.errors import UnsupportedModel
from engine.model.parallel.cut import Cut
from engine.model.parallel.stages import WHOLE, Stage, StandIn

_WHOLE = ("replicated_with_grad_allreduce",)
_KV = ("k_proj", "v_proj")


@dataclass(slots=True)
class Sharding:
    """One rank's part. cuts: by the id of each parameter that is a part of a stored tensor. row_parallel: modules whose
    results are parts of a sum."""

    rank: int
    size: int
    kv: KvSlice
    cuts: dict[int, Cut] = field(default_factory=dict)
    row_parallel: list[nn.Linear] = field(default_factory=list)
    _weights: dict[nn.Module, nn.Parameter] = field(default_factory=dict)

    def cut_of(self, parameter: Tensor) -> Cut | None:
        return self.cuts.get(id(parameter))

    def add(self, module: nn.Module, name: str, parameter: nn.Parameter, cut: Cut) -> None:
        """The module's parameter of that name is this part of the stored one."""
        setattr(module, name, parameter)
        self.cuts[id(parameter)] = cut
        if name == "weight":
            self._weights[module] = parameter  # kept, so that no other object gets its id

    def follow(self, model: nn.Module, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Once quantized layers have other parameters than `weight`: cut these as it was. stored: the shapes of the
        files' tensors. Raises UnsupportedModel for one that cannot be cut at the same place."""
        for name, module in model.named_modules():
            former = self._weights.pop(module, None)
            if former is None or module._parameters.get("weight") is former:
                continue
            cut = self.cuts.pop(id(former))
            for own, parameter in module.named_parameters(prefix=name, recurse=False):
                shape = stored.get(own, tuple(parameter.shape))
                if id(parameter) not in self.cuts and shape != tuple(parameter.shape):
                    self.cuts[id(parameter)] = _in_proportion(own, cut, shape, tuple(parameter.shape))


def shard(model: PreTrainedModel, rank: int, size: int) -> Sharding:
    """Shrink the parameters of a model without weights, or of a stage of it, to the rank's part. Raises
    UnsupportedModel, by name, for a model that cannot be divided so."""
    config = model.config.get_text_config()
    sharding = Sharding(rank, size, kv_slice(config, rank, size))
    styles = _styles(model)
    embedding, head = _vocabulary(model)
    if embedding is not None and head is not None and head.weight is embedding.weight:
        head.weight = _cut_vocabulary(sharding, embedding, config.vocab_size)
        head.out_features = embedding.num_embeddings
    else:
        for module in (embedding, head):
            if module is not None:
                _cut_vocabulary(sharding, module, config.vocab_size)
    for name, module in list(model.named_modules()):
        style = styles(name)
        if isinstance(module, StandIn) or module in (embedding, head):
            continue
        if style is not None and style not in _WHOLE:
            _cut_linear(sharding, config, name, module, style)
    return sharding


def kv_slice(config: Any, rank: int, size: int, stage: Stage = WHOLE) -> KvSlice:
    """The KV that the stage's rank holds. Raises UnsupportedModel for heads that cannot be divided."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size:
        raise UnsupportedModel(f"{config.model_type}: {heads} attention heads cannot be divided among {size} ranks")
    if kv_heads % size and size % kv_heads:
        raise UnsupportedModel(f"{config.model_type}: {kv_heads} KV heads cannot be divided among {size} ranks")
    num = max(1, kv_heads // size)
    first = rank * kv_heads // size
    layers = stage.layers(config.num_hidden_layers)
    return KvSlice(layers.start, layers.stop, first, first + num)


def _styles(model: PreTrainedModel) -> Callable[[str], str | None]:
    """The plan's style for a module's name."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if not any(style in ("colwise", "rowwise") for style in plan.values()):
        raise UnsupportedModel(f"{type(model).__name__} has no tensor-parallel plan")
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    return style_of


def _vocabulary(model: PreTrainedModel) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """What turns tokens into hidden states, and these into logits. None: another stage has it."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    known = isinstance(embedding, (nn.Embedding, StandIn)) and type(head) in (nn.Linear, StandIn)
    if not known or getattr(head, "bias", None) is not None:
        raise UnsupportedModel(f"{type(model).__name__}: its vocabulary is no embedding and linear layer")
    return (*(None if isinstance(module, StandIn) else module for module in (embedding, head)),)  # type: ignore[return-value]


def _cut_linear(sharding: Sharding, config: Any, name: str, module: nn.Module, style: str) -> None:
    if type(module) is not nn.Linear or style not in ("colwise", "rowwise"):
        raise UnsupportedModel(f"{config.model_type}: {name} has the tensor-parallel style {style}, which is not known")
    rank, size = sharding.rank, sharding.size
    if style == "rowwise":
        first, end = _exactly(module.in_features, rank, size, name)
        _shrink(sharding, module, "weight", Cut(1, first, end, tuple(module.weight.shape)))
        module.in_features = end - first
        sharding.row_parallel.append(module)
        return
    if name.rpartition(".")[2] in _KV:
        head_dim = module.out_features // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        first, end = sharding.kv.head_start * head_dim, sharding.kv.head_end * head_dim
    else:
        first, end = _exactly(module.out_features, rank, size, name)
    for parameter in ("weight", "bias"):
        if getattr(module, parameter) is not None:
            _shrink(sharding, module, parameter, Cut(0, first, end, tuple(getattr(module, parameter).shape)))
    module.out_features = end - first


def _cut_vocabulary(sharding: Sharding, module: nn.Embedding | nn.Linear, vocab_size: int) -> nn.Parameter:
    """The part of the weight. Rows beyond the vocabulary, which make all ranks' parts equal in size, are zero."""
    first, end = _even(vocab_size, sharding.rank, sharding.size)
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.padding_idx = end - first, None
    else:
        module.out_features = end - first
    return _shrink(sharding, module, "weight", Cut(0, first, end, tuple(module.weight.shape)))


def _shrink(sharding: Sharding, module: nn.Module, name: str, cut: Cut) -> nn.Parameter:
    whole = getattr(module, name)
    shape = list(whole.shape)
    shape[cut.dim] = cut.end - cut.first
    parameter = nn.Parameter(torch.empty(shape, dtype=whole.dtype), requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined] # transformers' initializers skip it
    sharding.add(module, name, parameter, cut)
    return parameter


def _in_proportion(name: str, cut: Cut, whole: tuple[int, ...], part: tuple[int, ...]) -> Cut:
    """The part, of such a shape, of a tensor of which each entry along the cut stands for equally many of the weight's
    rows or columns."""
    per_entry, rest = divmod(cut.whole[cut.dim], whole[cut.dim] if len(whole) > cut.dim else 1)
    first, end = cut.first // per_entry, cut.end // per_entry
    fits = not rest and not cut.first % per_entry and not cut.end % per_entry
    if not fits or part != (*whole[: cut.dim], end - first, *whole[cut.dim + 1 :]):
        raise UnsupportedModel(f"{name} is {whole}, of which {cut.first} to {cut.end} of {cut.whole} cannot be taken")
    return Cut(cut.dim, first, end, whole)


def _even(number: int, rank: int, size: int) -> tuple[int, int]:
    """Equal parts that together are at least `number`."""
    part = -(-number // size)
    return rank * part, (rank + 1) * part


def _exactly(number: int, rank: int, size: int, name: str) -> tuple[int, int]:
    if number % size:
        raise UnsupportedModel(f"{name}: {number} features cannot be divided among {size} ranks")
    return _even(number, rank, size)
