"""Which part of a model each rank holds, following transformers' tensor-parallel plan of the model.

    q, k, v, gate, up    some of the outputs (whole heads), also of a layer that computes several of these (`Packed`); a
                         KV head is on several ranks if there are fewer than ranks
    o, down              some of the inputs: each rank's product is a partial sum
    experts              a part of each expert, or some experts (`engine.model.parallel.experts`)
    embedding, head      some of the vocabulary
    the rest             whole, on every rank

The plans come from `engine.model.parallel.plan`; the head, the embedding and experts are always divided. The
collectives are in `engine.model.parallel.layers`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from baton.layout import KvSlice
from engine.model.errors import UnsupportedModel
from engine.model.experts import expert_modules, is_transposed
from engine.model.linear_method import Quantization
from engine.model.missing_modules import MissingModule, num_held_layers
from engine.model.parallel.cut import Cut, Span
from engine.model.parallel.experts import expert_cuts
from engine.model.parallel.group import RankGroup
from engine.model.parallel.plan import FEATURES, HEADS, KV_HEADS, REPLICATED, Packed, Style, styles
from engine.model.parallel.stages import WHOLE, Stage

Shape = tuple[int, ...]

_KV = ("k_proj", "v_proj")
_WIDTHS: Mapping[type, tuple[tuple[str, int], tuple[str, int]]] = {
    nn.Linear: (("out_features", 0), ("in_features", 1)),
    Conv1D: (("nf", 1), ("nx", 0)),
}
"""By class of linear layers: the attributes with the numbers of their outputs and inputs, and the dimensions of the
weight that these run along."""
_NORMED = {"q_proj": "q_norm", "k_proj": "k_norm"}
_OVER_HEADS = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
"""Attention that norms q and k over all heads: its layers besides the norms."""
_WIDE_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", *_NORMED.values()}
"""All modules of such attention."""


class WideNorm(NamedTuple):
    """A norm over all heads, the attribute `name` of an attention module. The rank holds elements [first, end) of what
    it norms."""

    attention: nn.Module
    name: str
    first: int
    end: int


class Place(NamedTuple):
    """A rank's number among the ranks that divide something, and their number."""

    rank: int
    size: int


@dataclass(slots=True)
class Sharding:
    """Which part of the model one rank holds.

    place: the rank's, among those of its stage. block_place: its place among the ranks that divide blocks of experts,
    possibly of several nodes. whole_experts, num_redundant_experts: see `RankPart`. cuts: by the id of each parameter
    that is a part of a stored tensor. column_parallel: modules that have some of the outputs, with their parts (see
    `Packed`). row_parallel: modules whose results are partial sums. experts, blocks: modules of experts, and the blocks
    that they are in, by name.
    """

    place: Place
    block_place: Place
    kv: KvSlice
    whole_experts: bool = False
    num_redundant_experts: int | None = None
    cuts: dict[int, Cut] = field(default_factory=dict)
    column_parallel: dict[nn.Module, tuple[str, ...]] = field(default_factory=dict)
    row_parallel: list[nn.Module] = field(default_factory=list)
    wide_norms: list[WideNorm] = field(default_factory=list)
    experts: dict[str, nn.Module] = field(default_factory=dict)
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    _parts: dict[tuple[nn.Module, str], nn.Parameter] = field(default_factory=dict)

    def columns(self, node: RankGroup, blocks: RankGroup) -> dict[nn.Module, RankGroup]:
        """The modules that hold some columns of a weight, each with the group whose ranks hold the others: `node` or
        `blocks`."""
        experts = () if self.whole_experts else self.experts.values()
        within = self.modules_of_blocks
        return {module: blocks if module in within else node for module in (*self.row_parallel, *experts)}

    @property
    def modules_of_blocks(self) -> dict[nn.Module, str]:
        """All modules within blocks of experts, each with its block's name."""
        return {module: name for name, block in self.blocks.items() for module in block.modules()}

    def place_of(self, name: str) -> Place:
        """This rank's place among the ranks that divide the module of that name."""
        return self.block_place if any(name.startswith(f"{block}.") for block in self.blocks) else self.place

    def cut_of(self, parameter: Tensor) -> Cut | None:
        return self.cuts.get(id(parameter))

    def add(self, module: nn.Module, name: str, parameter: nn.Parameter, cut: Cut) -> None:
        """Give the module this parameter under that name, and record which part of the stored tensor it is."""
        setattr(module, name, parameter)
        self.cuts[id(parameter)] = cut
        self._parts[module, name] = parameter  # kept, so that no other object gets its id

    def follow(self, model: nn.Module, stored: Mapping[str, Shape], quantization: Quantization) -> None:
        """Where quantization has replaced a weight by other parameters, cut these as the weight was cut. stored: the
        shapes of the files' tensors, by their names in the model. Raises UnsupportedModel for a tensor that cannot be
        cut at the same place."""
        names = {module: name for name, module in model.named_modules()}
        experts = set(self.experts.values())
        for (module, weight), former in self._parts.items():
            if module._parameters.get(weight) is former:
                continue
            cut = self.cuts.pop(id(former))
            for name, parameter in module.named_parameters(recurse=False):
                own, part = f"{names[module]}.{name}", tuple(parameter.shape)
                whole, along = stored.get(own), cut
                if module not in experts:
                    dim = quantization.stored_dim(name, cut.dim)
                elif name.startswith(weight):
                    kind = name.removeprefix(weight).removeprefix("_")
                    dim = quantization.expert_stored_dim(names[module], kind, _by_rows(module, cut))
                    whole = whole or quantization.expert_parameter_shape(names[module], name, cut.whole)
                    if dim != 1:  # gate and up follow each other in dimension 1, whatever runs there
                        along = _first_span(cut)
                else:
                    continue
                if dim is not None and id(parameter) not in self.cuts and whole not in (None, part):
                    self.cuts[id(parameter)] = _in_proportion(own, along, dim, whole, part)


def shard(
    model: PreTrainedModel,
    place: Place,
    block_place: Place | None = None,
    *,
    whole_experts: bool = False,
    num_redundant_experts: int | None = None,
    expert_block: Callable[[str], int] = lambda name: 1,
) -> Sharding:
    """Shrink the parameters of a model (or of one of its stages), before it has weights, to the rank's part.
    block_place: see Sharding; None: `place`. whole_experts: `--enable-expert-parallel`; num_redundant_experts: not None
    with `--enable-eplb`. expert_block: see Quantization. Raises UnsupportedModel, which names the module, for a model
    that cannot be divided so."""
    config = model.config.get_text_config()
    kv = kv_slice(config, *place)
    sharding = Sharding(place, block_place or place, kv, whole_experts, num_redundant_experts)
    style_of = styles(model)
    embedding, head = _vocabulary(model)
    ties = getattr(embedding, "weight", None) is getattr(head, "weight", None)
    for module in (embedding, head):
        if module is not None:
            _cut_vocabulary(sharding, module, config.vocab_size)
    if ties and embedding is not None and head is not None:
        head.weight = embedding.weight
    _cut_experts(sharding, model, expert_block)
    done = {embedding, head, *sharding.experts.values()}
    for name, module in list(model.named_modules()):
        style = style_of(name)
        if isinstance(module, MissingModule) or module in done:
            continue
        if style is not None and style not in REPLICATED:
            _cut_linear(sharding, config, name, module, style, model.get_submodule(name.rpartition(".")[0]))
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            if (by := style_of(own)) in (HEADS, KV_HEADS):
                spans = _spans_of(sharding, config, own, (by,), len(parameter))
                _shrink(sharding, module, own.rpartition(".")[2], Cut(0, spans, tuple(parameter.shape)))
    attentions = {
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if KV_HEADS in sharding.column_parallel.get(module, ())
    }
    if len(attentions) != num_held_layers(model):
        raise UnsupportedModel(f"{config.model_type} has no tensor-parallel plan for its attention")
    return sharding


def _cut_experts(sharding: Sharding, model: PreTrainedModel, expert_block: Callable[[str], int]) -> None:
    sharding.experts = dict(expert_modules(model))
    for name, module in sharding.experts.items():
        block = name.rpartition(".")[0]
        sharding.blocks[block] = model.get_submodule(block)
        whole, num_redundant = sharding.whole_experts, sharding.num_redundant_experts
        place, in_block = sharding.block_place, expert_block(name)
        cuts = expert_cuts(name, module, *place, whole=whole, num_redundant=num_redundant, block=in_block)
        for parameter, cut in cuts.items():
            _shrink(sharding, module, parameter, cut)


def kv_slice(config: Any, rank: int, size: int, stage: Stage = WHOLE) -> KvSlice:
    """The KV that a rank of the stage holds. Raises UnsupportedModel for heads that cannot be divided."""
    heads, kv_heads = _num_heads(config)
    if heads % size:
        raise UnsupportedModel(f"{config.model_type}: {heads} attention heads cannot be divided among {size} ranks")
    if kv_heads % size and size % kv_heads:
        raise UnsupportedModel(f"{config.model_type}: {kv_heads} KV heads cannot be divided among {size} ranks")
    num = max(1, kv_heads // size)
    first = rank * kv_heads // size
    layers = stage.layers(config.num_hidden_layers)
    return KvSlice(layers.start, layers.stop, first, first + num)


def _num_heads(config: Any) -> tuple[int, int]:
    """Of a model: attention heads, KV heads."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _vocabulary(model: PreTrainedModel) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """The embedding and the head; None for one that another stage holds."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    known = isinstance(embedding, (nn.Embedding, MissingModule)) and type(head) in (nn.Linear, MissingModule)
    if not known:
        raise UnsupportedModel(f"{type(model).__name__}: its vocabulary is no embedding and linear layer")
    return (*(None if isinstance(module, MissingModule) else module for module in (embedding, head)),)  # type: ignore[return-value]


def _cut_linear(sharding: Sharding, config: Any, name: str, module: Any, style: Style, parent: nn.Module) -> None:
    part = name.rpartition(".")[2]
    over_heads = style in _OVER_HEADS and {own for own, _ in parent.named_children()} == _WIDE_ATTENTION
    if over_heads:
        style = _OVER_HEADS[str(style)]
    if style == "colwise":
        style = Packed((KV_HEADS if part in _KV else FEATURES,))
    if type(module) not in _WIDTHS or not (isinstance(style, Packed) or style == "rowwise"):
        raise UnsupportedModel(f"{config.model_type}: {name} has the tensor-parallel style {style}, which is not known")
    (outputs, rows), (inputs, columns) = _WIDTHS[type(module)]
    weight = tuple(module.weight.shape)
    if not isinstance(style, Packed):
        span = _exactly(getattr(module, inputs), sharding.place_of(name), name)
        cut = Cut(columns, (span,), weight)
        _shrink(sharding, module, "weight", cut)
        setattr(module, inputs, cut.shape[columns])
        sharding.row_parallel.append(module)
        return
    width = getattr(module, outputs)
    spans = _spans_of(sharding, config, name, style.parts, width)
    cut = Cut(rows, spans, weight)
    _shrink(sharding, module, "weight", cut)
    if module.bias is not None:
        _shrink(sharding, module, "bias", Cut(0, spans, tuple(module.bias.shape)))
    if over_heads and part in _NORMED:
        _require_wide(name, getattr(parent, _NORMED[part]), width)
        sharding.wide_norms.append(WideNorm(parent, _NORMED[part], *spans[0]))
    setattr(module, outputs, cut.shape[rows])
    sharding.column_parallel[module] = style.parts
    for attribute, kind in style.counts:
        _divide_count(sharding, config, parent, attribute, kind)


def _spans_of(sharding: Sharding, config: Any, name: str, parts: tuple[str, ...], width: int) -> tuple[Span, ...]:
    """What the rank holds of each of the parts, of which the layer of that name has `width` outputs."""
    (heads, kv_heads), kv = _num_heads(config), sharding.kv
    numbers = {HEADS: heads, KV_HEADS: kv_heads, FEATURES: width // len(parts)}
    per_entry, start, spans = width // sum(numbers[part] for part in parts), 0, list[Span]()
    place = sharding.place_of(name)
    for part in parts:
        first, end = (kv.head_start, kv.head_end) if part == KV_HEADS else _exactly(numbers[part], place, name)
        spans.append(((start + first) * per_entry, (start + end) * per_entry))
        start += numbers[part]
    return tuple(spans)


def _divide_count(sharding: Sharding, config: Any, module: Any, path: str, kind: str) -> None:
    """Make a number of the module, or of its copy of the configuration that all share, that of this rank."""
    owner, _, attribute = path.rpartition(".")
    if owner:
        setattr(module, owner, copy.copy(getattr(module, owner)))
        module = getattr(module, owner)
    (_, kv_heads), kv = _num_heads(config), sharding.kv
    own, whole = (kv.head_end - kv.head_start, kv_heads) if kind == KV_HEADS else (1, sharding.place.size)
    setattr(module, attribute, getattr(module, attribute) * own // whole)


def _require_wide(name: str, norm: nn.Module, width: int) -> None:
    shapes = [tuple(parameter.shape) for parameter in norm.parameters()]
    if shapes != [(width,)]:
        raise UnsupportedModel(f"{name}: a norm of {shapes} after its {width} features cannot be divided among ranks")


def _cut_vocabulary(sharding: Sharding, module: nn.Embedding | nn.Linear, vocab_size: int) -> None:
    """Cut the weight, and the bias of a head. Rows of zeros beyond the vocabulary make the parts of all ranks equal in
    size."""
    first, end = _even(vocab_size, sharding.place)
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.padding_idx = end - first, None
    else:
        module.out_features = end - first
    for name, parameter in list(module.named_parameters(recurse=False)):
        _shrink(sharding, module, name, Cut(0, ((first, end),), tuple(parameter.shape)))


def _shrink(sharding: Sharding, module: nn.Module, name: str, cut: Cut) -> None:
    whole = getattr(module, name)
    parameter = nn.Parameter(torch.empty(cut.shape, dtype=whole.dtype), requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined] # transformers' initializers skip it
    sharding.add(module, name, parameter, cut)


def _by_rows(module: nn.Module, cut: Cut) -> int:
    """The cut's dimension in the parameter that replaces the weight: it has outputs as rows, even where the experts'
    weights are transposed."""
    return 3 - cut.dim if is_transposed(module) and cut.dim else cut.dim


def _first_span(cut: Cut) -> Cut:
    """Of a cut with a span in each of several equal tensors, that in the first one."""
    whole, section = list(cut.whole), cut.whole[cut.dim] // len(cut.spans)
    whole[cut.dim] = section
    return Cut(cut.dim, cut.spans[:1], tuple(whole))


def _in_proportion(name: str, cut: Cut, dim: int, whole: tuple[int, ...], part: tuple[int, ...]) -> Cut:
    """The cut of a tensor whose entries along `dim` each stand for equally many entries of the weight along its own
    cut. whole, part: the tensor's shape in the files and on this rank. Raises UnsupportedModel if the cut does not fall
    between entries."""
    per_entry, rest = divmod(cut.whole[cut.dim], whole[dim] if len(whole) > dim else 1)
    ends = [index for span in cut.spans for index in span]
    if not per_entry or rest or any(index % per_entry for index in ends) or len(whole) <= dim:
        found = None
    else:
        found = Cut(dim, tuple((first // per_entry, end // per_entry) for first, end in cut.spans), whole)
    if found is None or found.shape != part:
        spans = " and ".join(f"{first} to {end}" for first, end in cut.spans)
        raise UnsupportedModel(f"{name} is {whole}, of which {spans} of {cut.whole} cannot be taken")
    return found


def _even(number: int, place: Place) -> tuple[int, int]:
    """The rank's range when `number` is divided into equal parts, rounded up."""
    part = -(-number // place.size)
    return place.rank * part, (place.rank + 1) * part


def _exactly(number: int, place: Place, name: str) -> tuple[int, int]:
    if number % place.size:
        raise UnsupportedModel(f"{name}: {number} features cannot be divided among {place.size} ranks")
    return _even(number, place)
