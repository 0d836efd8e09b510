"""Random models, divided among ranks in two ways, and what each rank of the receiver must hold in the end.

What is expected is computed from the whole model's KV, head by head, and from no plan, pair or row.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.layout import QUANTIZED_TOKENS, KvLayout, KvSlice, LayerKv, as_quantized, dtype_bytes, layer_groups_of
from baton_kernels.fp8_kv import dequantize, elements_of, quantize
from kv_transfer.parts import CHECKSUM_BYTES, PlannedPart
from tests.kv_transfer.rank_node import Bytes, Request

DEGREES = (1, 2, 4, 8)
CONVERTIBLE = ("float32", "float16", "bfloat16")
_WINDOWS = st.sampled_from([None, 16])
_LAYERS = st.builds(
    LayerKv,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["int8", "float16", "float32"]),
    _WINDOWS,
)


def divided(num_layers: Sequence[int], num_heads: int, degree: int) -> tuple[KvSlice, ...]:
    """Stages of so many layers each, of `degree` ranks each. More ranks than heads hold the same as others."""
    ends = list(itertools.accumulate(num_layers, initial=0))
    if degree <= num_heads:
        heads = layer_groups_of(num_heads, degree)
    else:
        heads = [(rank * num_heads // degree, rank * num_heads // degree + 1) for rank in range(degree)]
    return tuple(KvSlice(*layers, *run) for layers in itertools.pairwise(ends) for run in heads)


class Case(NamedTuple):
    """Nodes P and D, a request whose first `num_held` of `num_table` blocks D has, and how it travels. part_blocks: of
    each rank's slots. seed: of contents, block tables and the order of events."""

    p: KvLayout
    d: KvLayout
    p_part_blocks: tuple[int, ...]
    d_part_blocks: tuple[int, ...]
    num_slots: int = 2
    num_table: int = 8
    num_held: int = 1
    grouped_from: int = 5
    num_groups: int = 2
    checked: bool = True
    seed: int = 1

    def __repr__(self) -> str:
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def layers_of(self, entry: int) -> tuple[int, ...]:
        """Of the block at that entry of a table: those of its KV group."""
        groups = self.p.layers_of_groups
        return groups[entry % len(groups)]

    def num_bytes(self, part: PlannedPart) -> int:
        """Of a part."""
        if not self.p.groups:
            return part.num_blocks * part.num_bytes
        entries = range(part.first, part.first + part.num_blocks)
        num_layers = sum(layer in self.layers_of(entry) for entry in entries for layer in range(*part.kv_slice[:2]))
        return num_layers * part.kv_slice.num_heads * part.layers[0].head_bytes(self.p.block_size)

    @property
    def num_blocks(self) -> int:
        """Of either pool: block 0 is the null block, and some are others'."""
        return self.num_table + 3

    def tables(self) -> list[tuple[int, ...]]:
        """The request's blocks at P, and at D."""
        rng = random.Random(self.seed)
        return [tuple(rng.sample(range(1, self.num_blocks), self.num_table)) for _ in range(2)]

    def requests(self, p_part_blocks: int, d_part_blocks: int) -> tuple[Request, Request]:
        """P's and D's, each with its own blocks. part_blocks: of the nodes."""
        tables = self.tables()
        where = self.num_held, self.num_table, self.grouped_from, self.num_groups
        ours = Request(self.d, d_part_blocks, *where, tables[0], self.checked)
        return ours, Request(self.p, p_part_blocks, *where, tables[1])


def simple_case(
    degrees: tuple[int, int],
    stages: tuple[int, int],
    num_heads: int = 4,
    form: tuple[bool, bool] = (False, False),
    width: int = 4,
    groups: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """P's and D's degrees of tensor parallelism, and numbers of stages. form: whether their KV is quantized. groups:
    see KvLayout."""
    layers = tuple(LayerKv(num_heads, width, width, "bfloat16", window) for window in (None, 24, None, 24, 24))
    ends = []
    for degree, num_stages, quantized in zip(degrees, stages, form, strict=True):
        sizes = [end - first for first, end in layer_groups_of(len(layers), num_stages)]
        kept = tuple(map(as_quantized, layers)) if quantized else layers
        ends.append(KvLayout(kept, QUANTIZED_TOKENS, "f", divided(sizes, num_heads, degree), groups))
    p, d = ends
    p_part_blocks = tuple(2 + rank % 2 for rank in range(len(p.ranks)))
    return Case(p, d, p_part_blocks, (3,) * len(d.ranks), seed=sum(degrees) + 9 * stages[1] + num_heads)


@st.composite
def divisions(draw: st.DrawFn, layers: tuple[LayerKv, ...], may_divide_heads: bool) -> tuple[KvSlice, ...]:
    cuts = draw(st.lists(st.integers(1, len(layers) - 1), max_size=2, unique=True)) if len(layers) > 1 else []
    stages = [end - first for first, end in itertools.pairwise([0, *sorted(cuts), len(layers)])]
    degree, num_heads = draw(st.sampled_from(DEGREES)), max(layer.num_kv_heads for layer in layers)
    if may_divide_heads:
        ranks = divided(stages, num_heads, degree)
    else:  # each rank has all heads, as with MLA
        ranks = tuple(held._replace(head_end=num_heads) for held in divided(stages, 1, degree))
    return tuple(draw(st.permutations(ranks)))


@st.composite
def models(draw: st.DrawFn, whole_words: bool) -> tuple[tuple[LayerKv, ...], tuple[LayerKv, ...], int]:
    """P's layers, D's, and the block size. whole_words: pieces can have checksums, however ranks divide them."""
    num_layers, form = draw(st.integers(1, 6)), draw(st.sampled_from(["same", "unlike", "p quantized", "d quantized"]))
    if form == "unlike":
        kinds = draw(st.lists(_LAYERS, min_size=num_layers, max_size=num_layers))
    else:
        heads, width, has_v = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.booleans())
        dtype = draw(st.sampled_from(CONVERTIBLE if "quantized" in form else (*CONVERTIBLE, "int8")))
        kinds = [LayerKv(heads, width, width * has_v, dtype, draw(_WINDOWS)) for _ in range(num_layers)]
    plain = tuple(kinds)
    narrow = tuple(map(as_quantized, plain))
    if form == "same" and draw(st.booleans()):
        plain = narrow
    ends = narrow if form == "p quantized" else plain, narrow if form == "d quantized" else plain
    needs_words = whole_words or narrow in ends
    return *ends, draw(st.sampled_from((8, 16) if needs_words else (1, 2, 5, 8)))


@st.composite
def kv_groups(draw: st.DrawFn, layers: tuple[LayerKv, ...]) -> tuple[tuple[int, ...], ...]:
    """Of layers with the same window, any numbers; often one of all layers."""
    alike = len({dataclasses.replace(layer, sliding_window=None) for layer in layers}) == 1
    if not alike or draw(st.booleans()):
        return ()
    found = list[tuple[int, ...]]()
    for window in {layer.sliding_window for layer in layers}:
        members = [index for index, layer in enumerate(layers) if layer.sliding_window == window]
        placed = draw(st.lists(st.integers(0, 2), min_size=len(members), max_size=len(members)))
        for number in sorted(set(placed)):
            found.append(tuple(layer for layer, at in zip(members, placed, strict=True) if at == number))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn, is_checked: bool = False) -> Case:
    """is_checked: all parts have checksums."""
    *ends, block_size = draw(models(is_checked))
    may_divide_heads = KvLayout(ends[0], block_size, "").has_equal_runs
    groups = draw(kv_groups(ends[0]))
    p, d = (KvLayout(layers, block_size, "f", draw(divisions(layers, may_divide_heads)), groups) for layers in ends)
    num_table = draw(st.integers(1, 9))
    return Case(
        p,
        d,
        draw(_slot_sizes(p)),
        draw(_slot_sizes(d)),
        num_slots=draw(st.integers(1, 3)),
        num_table=num_table,
        num_held=draw(st.integers(0, num_table - 1)),
        grouped_from=draw(st.integers(0, num_table)),
        num_groups=draw(st.integers(1, p.num_layers)),
        checked=_has_whole_words(p.sent(d)) and (is_checked or draw(st.booleans())),
        seed=draw(st.integers(0, 2**16)),
    )


def _slot_sizes(layout: KvLayout) -> st.SearchStrategy[tuple[int, ...]]:
    """Of each rank, in blocks."""
    return st.tuples(*[st.integers(1, 4)] * len(layout.ranks))


def _has_whole_words(sent: KvLayout) -> bool:
    """Whether each piece can have a checksum, however ranks divide it."""
    block_size, layers = sent.block_size, sent.layers
    sizes = {
        dataclasses.replace(layer, num_kv_heads=1, head_dim_k=width, head_dim_v=0).head_bytes(block_size)
        for layer in layers
        for width in (layer.head_dim_k, layer.head_dim_v)
        if width
    }
    return not any(size % CHECKSUM_BYTES for size in sizes)


# ---- the whole model's KV, and what ranks have of it ----

Kv = list[list[Tensor]]
"""For each layer its K, and its V if there is one: [num_blocks, heads, bytes of a head], uint8."""


def random_kv(layers: Sequence[LayerKv], block_size: int, num_blocks: int, generator: torch.Generator) -> Kv:
    """Numbers of the layers' dtype, of many sizes: no NaN, since it need not keep its bits when converted."""
    return [
        [
            _stored(layer, _numbers((num_blocks, layer.num_kv_heads, block_size, width), generator))
            for width in (layer.head_dim_k, layer.head_dim_v)
            if width
        ]
        for layer in layers
    ]


def _numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 4.0 ** torch.randint(-4, 4, (*shape[:-1], 1), generator=generator)


def _stored(layer: LayerKv, numbers: Tensor) -> Tensor:
    """[..., block_size, head_dim] as the layer stores them: [..., bytes]."""
    if layer.scale_dtype:
        elements, scales = quantize(numbers)
        return torch.cat((elements.view(torch.uint8).flatten(-2), scales), dim=-1)
    return numbers.to(getattr(torch, layer.dtype)).view(torch.uint8).flatten(-2)


def converted(kv: Kv, mine: KvLayout, other: KvLayout) -> Kv:
    """That KV as a node of another layout stores it."""
    return [
        [_converted(run, layer, to, mine.block_size) for run in runs]
        for runs, layer, to in zip(kv, mine.layers, other.layers, strict=True)
    ]


def _converted(run: Tensor, layer: LayerKv, to: LayerKv, block_size: int) -> Tensor:
    if layer.form == to.form:
        return run
    if to.scale_dtype:
        dtype = getattr(torch, layer.dtype)
        width = run.shape[-1] // block_size // dtype_bytes(layer.dtype)
        return _stored(to, run.view(dtype).unflatten(-1, (block_size, width)))
    width = run.shape[-1] // block_size - 1
    elements = elements_of(run, block_size, width)
    whole = dequantize(elements, run[..., block_size * width :], getattr(torch, to.dtype))
    return whole.view(torch.uint8).flatten(-2)


def own_layers(group: Sequence[int], held: KvSlice) -> list[int]:
    """Those of a group that a rank has, in the order in which they are in a block there."""
    return [layer for layer in group if held.layer_start <= layer < held.layer_end]


def slots_of(layout: KvLayout, held: KvSlice) -> list[LayerKv]:
    """What is in a block of a rank, layer by layer: of several groups as much as the one with the most layers has."""
    own = max((own_layers(group, held) for group in layout.layers_of_groups), key=len)
    return [layout.layers[layer] for layer in own]


def pool_of(slots: Kv, held: KvSlice) -> Bytes:
    """[num_blocks, bytes of a block]: what a rank that holds this slice has, of whose heads `slots` has all."""
    runs = itertools.chain.from_iterable(slots)
    whole = torch.cat([run[:, held.head_start : held.head_end].flatten(1) for run in runs], dim=1)
    found: Bytes = whole.numpy()
    return found


class Contents:
    """What P's ranks and D's ranks have before a case, and D's after it. Ranks of D that hold the same slice begin with
    other bytes each."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.case = case
        whole = random_kv(case.p.layers, case.p.block_size, case.num_blocks, generator)
        self._sent = converted(whole, case.p, case.d)
        self._before = [self._any(case.d, held, generator) for held in case.d.ranks]
        self._tables = [list(table) for table in case.tables()]
        self.p = [self._sender_pool(whole, held, generator) for held in case.p.ranks]
        self.d = self.d_after([])

    def _any(self, layout: KvLayout, held: KvSlice, generator: torch.Generator) -> Kv:
        return random_kv(slots_of(layout, held), layout.block_size, self.case.num_blocks, generator)

    def _sender_pool(self, whole: Kv, held: KvSlice, generator: torch.Generator) -> Bytes:
        slots = self._any(self.case.p, held, generator)
        for entry, block in enumerate(self._tables[0]):
            for slot, layer in enumerate(own_layers(self.case.layers_of(entry), held)):
                for run, of_layer in zip(slots[slot], whole[layer], strict=True):
                    run[block] = of_layer[block]
        return pool_of(slots, held)

    def d_after(self, parts: Iterable[PlannedPart]) -> list[Bytes]:
        """D's pools when just these parts have landed."""
        after = [_each(slots, torch.clone) for slots in self._before]
        for part in parts:
            entries = range(part.first, part.first + part.num_blocks)
            self._copy(self._sent, after, part.target, part.kv_slice, entries)
        return self._pools(after)

    def d_in_the_end(self, before: list[Bytes]) -> list[Bytes]:
        """D's pools, of which this was in them, when each rank has its slice of all blocks."""
        arrived = self._all_of(self._sent, [_each(slots, torch.clone) for slots in self._before])
        written = self._all_of(
            _each(self._sent, torch.ones_like), [_each(slots, torch.zeros_like) for slots in self._before]
        )
        return [np.where(*pools) for pools in zip(written, arrived, before, strict=True)]

    def _all_of(self, sent: Kv, after: list[Kv]) -> list[Bytes]:
        for rank, held in enumerate(self.case.d.ranks):
            self._copy(sent, after, rank, held, range(self.case.num_held, self.case.num_table))
        return self._pools(after)

    def _copy(self, sent: Kv, after: list[Kv], rank: int, kv_slice: KvSlice, entries: Iterable[int]) -> None:
        for entry in entries:
            source, target = (table[entry] for table in self._tables)
            for slot, layer in enumerate(own_layers(self.case.layers_of(entry), self.case.d.ranks[rank])):
                if not kv_slice.layer_start <= layer < kv_slice.layer_end:
                    continue
                for run, of_layer in zip(after[rank][slot], sent[layer], strict=True):
                    heads = slice(kv_slice.head_start, min(kv_slice.head_end, run.shape[1]))
                    run[target, heads] = of_layer[source, heads]

    def _pools(self, after: list[Kv]) -> list[Bytes]:
        return [pool_of(slots, held) for slots, held in zip(after, self.case.d.ranks, strict=True)]


def _each(kv: Kv, change: Callable[[Tensor], Tensor]) -> Kv:
    return [[change(run) for run in runs] for runs in kv]


def carried_once(case: Case) -> Counter[tuple[int, int, int, int, int]]:
    """(source, target, block, layer, head) of all that must be sent: what each rank of D holds, from the first rank of
    P that holds it."""
    holders: dict[tuple[int, int], int] = {}
    for rank, held in enumerate(case.p.ranks):
        for cell in _cells(held):
            holders.setdefault(cell, rank)
    return Counter(
        (holders[cell], target, block, *cell)
        for target, held in enumerate(case.d.ranks)
        for cell in _cells(held)
        for block in range(case.num_held, case.num_table)
        if cell[0] in case.layers_of(block)
    )


def carried_by(case: Case, parts: Iterable[tuple[int, int, KvSlice, range]]) -> Counter[tuple[int, int, int, int, int]]:
    """The same of parts, given as source, target, slice and blocks."""
    return Counter(
        (source, target, block, *cell)
        for source, target, kv_slice, blocks in parts
        for cell in _cells(kv_slice)
        for block in blocks
        if cell[0] in case.layers_of(block)
    )


def _cells(kv_slice: KvSlice) -> Iterable[tuple[int, int]]:
    return itertools.product(
        range(kv_slice.layer_start, kv_slice.layer_end), range(kv_slice.head_start, kv_slice.head_end)
    )


def same_bytes(found: Sequence[Bytes], wanted: Sequence[Bytes]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
