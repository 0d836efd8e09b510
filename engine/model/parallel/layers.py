"""The layers of a divided model that communicate with other ranks: row-parallel layers, norms over all heads, and the
vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model.errors import UnsupportedModel
from engine.model.linear_method import LinearMethod, Product, attach, method_of
from engine.model.missing_modules import MissingModule
from engine.model.parallel.data_parallel import DataParallel
from engine.model.parallel.expert_slots import connect_slots
from engine.model.parallel.experts import connect_experts, sum_block
from engine.model.parallel.group import RankGroup
from engine.model.parallel.plan import KV_HEADS
from engine.model.parallel.sharding import Sharding, WideNorm
from engine.model.tolerance import Tolerance, close


@torch.no_grad()
def connect(model: PreTrainedModel, sharding: Sharding, group: RankGroup, experts: DataParallel) -> None:
    """Connect a model's layers to the parts on the other ranks. Weights are loaded and linear methods attached before.
    group: the ranks that divide the layers. experts: the ranks that divide blocks of experts. Raises
    UnsupportedModel."""
    _require_separable(model, sharding)
    within = sharding.modules_of_blocks
    summed: dict[str, list[nn.Module]] = {name: [] for name in sharding.blocks}
    for layer, (name, module) in enumerate(sharding.experts.items()):
        if sharding.num_redundant_experts is not None:
            connect_slots(layer, module, experts.everyone, sharding.num_redundant_experts)
        else:
            connect_experts(module, experts.everyone, whole=sharding.whole_experts)
        summed[name.rpartition(".")[0]].append(module)
    for module in sharding.row_parallel:
        ranks = experts.everyone if module in within else group
        bias: Any = module.bias
        if bias is not None and ranks.rank:
            bias.zero_()  # only rank 0 adds it to the sum
        if module in within:
            summed[within[module]].append(module)
        else:
            attach(module, RowParallelLinear(_method(module), group))
    for name, parts in summed.items():
        sum_block(name, sharding.blocks[name], parts, _few_tokens(model), experts)
    for norm in sharding.wide_norms:
        setattr(norm.attention, norm.name, NormOverRanks(norm, group))
    head: Any = model.get_output_embeddings()
    if not isinstance(head, MissingModule):
        vocab_size = model.config.get_text_config().vocab_size
        attach(head, VocabParallelHead(_method(head), group, vocab_size))
    embedding: Any = model.get_input_embeddings()
    if not isinstance(embedding, MissingModule):
        _connect_embedding(embedding, group)


class _Reached(Exception):
    """A layer was reached, whose results are not needed."""


def _require_separable(model: PreTrainedModel, sharding: Sharding) -> None:
    """Refuse an MLP in which a feature depends on others (Gemma 3n keeps those far above their mean), of which other
    ranks hold some: half of its features must come out the same without the other half."""
    columns, names = sharding.column_parallel, {module: name for name, module in model.named_modules()}
    for down in sharding.row_parallel:
        name = names[down].rpartition(".")[0]
        mlp = model.get_submodule(name)
        before = {child: len(columns[child]) for child in mlp.children() if child in columns}
        if any(KV_HEADS in columns[child] for child in before):
            continue  # attention, whose features are heads
        whole, half = (_features(mlp, before, down, share, _few_tokens(model)) for share in (1, 2))
        if not close(half, whole[..., : half.shape[-1]]):
            raise UnsupportedModel(f"{name}: its features depend on one another, and cannot be divided among ranks")


def _features(mlp: nn.Module, before: dict[nn.Module, int], down: nn.Module, share: int, x: Tensor) -> Tensor:
    """What `down` gets if each layer before it returns the first of `share` parts of its features, all random. before:
    these layers, each with the number of layers whose features it has: of each, it returns the first ones."""
    found: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor]) -> None:
        found.append(inputs[0])
        raise _Reached

    own = [layer.forward for layer in before]
    hook = down.register_forward_pre_hook(stop)
    for seed, (layer, num) in enumerate(before.items()):
        width = _method(layer).out_features // num
        generator, size = torch.Generator().manual_seed(seed), (*x.shape[:-1], num, width)
        # The default dtype, which another thread may change meanwhile, would decide which values are drawn.
        values = torch.randn(size, generator=generator, dtype=torch.float32).to(x)
        layer.forward = partial(_first, values, width // share)
    try:
        mlp(x)
    except _Reached:
        pass
    finally:
        hook.remove()
        for layer, forward in zip(before, own, strict=True):
            layer.forward = forward
    return found[0]


def _first(values: Tensor, number: int, _: Tensor) -> Tensor:
    return values[..., :number].flatten(-2)


class _Collective(LinearMethod):
    """A linear layer of which each rank holds a part. own: this rank's part."""

    def __init__(self, own: LinearMethod, group: RankGroup) -> None:
        self._own, self._group = own, group
        self.in_features, self.out_features = own.in_features, own.out_features
        self.dtype, self.input_dtype = own.dtype, own.input_dtype

    @property
    def tolerance(self) -> Tolerance:
        return self._own.tolerance

    def reference(self, x: Tensor) -> Tensor:
        return self._join(self._own.reference(x))

    def make_product(self) -> Product:
        product, join = self._own.make_product(), self._join

        def joined(x: Tensor) -> Tensor:
            return join(product(x))

        return joined

    def pack(self, x: Tensor) -> list[Tensor]:
        return self._own.pack(x)

    def _join(self, own: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def can_concatenate(cls, parts: Sequence[Self]) -> bool:
        return False

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        raise NotImplementedError


class RowParallelLinear(_Collective):
    """Each rank multiplies its part of the inputs, and the results are all-reduced."""

    @property
    def group(self) -> RankGroup:
        """The ranks that hold the parts, with this one."""
        return self._group

    @property
    def own(self) -> LinearMethod:
        """This rank's part."""
        return self._own

    def make_product_for_norm(self) -> Product:
        """This rank's partial result if what follows sums it (`RankGroup.norms_sum`); else the sum."""
        product, group = self._own.make_product(), self._group
        in_features, out_features = self.in_features, self.out_features

        def part_or_sum(x: Tensor) -> Tensor:
            part = product(x)
            if group.norms_sum(x.numel() // in_features, out_features * x.itemsize):
                return part
            return group.all_reduce(part)

        return part_or_sum

    def _join(self, own: Tensor) -> Tensor:
        return self._group.all_reduce(own)


class VocabParallelHead(_Collective):
    """Each rank computes the logits of its part of the vocabulary; an all-gather gives every rank all logits."""

    def __init__(self, own: LinearMethod, group: RankGroup, vocab_size: int) -> None:
        super().__init__(own, group)
        self.out_features = vocab_size

    def _join(self, own: Tensor) -> Tensor:
        return self._group.all_gather(own)[..., : self.out_features]


class NormOverRanks(nn.Module):
    """A norm over the heads of all ranks. Takes this rank's heads x, and returns them normed."""

    def __init__(self, wide: WideNorm, group: RankGroup) -> None:
        super().__init__()
        self.norm: Any = getattr(wide.attention, wide.name)
        self._first, self._end, self._group = wide.first, wide.end, group

    def forward(self, x: Tensor) -> Tensor:
        ranks = self._group.all_gather(x).view(*x.shape[:-1], self._group.size, -1)
        copies = ranks.shape[-2] * ranks.shape[-1] // self.norm.weight.shape[0]  # so many ranks have the same KV heads
        normed: Tensor = self.norm(ranks[..., ::copies, :].flatten(-2))
        return normed[..., self._first : self._end]


def _few_tokens(model: PreTrainedModel) -> Tensor:
    hidden_size = model.config.get_text_config().hidden_size
    x = torch.randn(1, 3, hidden_size, generator=torch.Generator().manual_seed(0))
    return x.to(model.device, model.dtype)


def _method(module: nn.Module) -> LinearMethod:
    method = method_of(module)
    assert method is not None
    return method


def _connect_embedding(module: nn.Module, group: RankGroup) -> None:
    """Make each rank look up the tokens of its part of the vocabulary, and all-reduce the results. Works for subclasses
    that scale the result."""
    look_up: Any = module.forward
    weight: Any = module.weight
    first, rows = group.rank * weight.shape[0], weight.shape[0]

    def forward(input_ids: Tensor) -> Tensor:
        own = input_ids - first
        others = (own < 0) | (own >= rows)
        found: Tensor = look_up(own.masked_fill(others, 0))
        return group.all_reduce(found.masked_fill_(others[..., None], 0))

    module.forward = forward
