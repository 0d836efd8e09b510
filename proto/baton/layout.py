"""The layout of a model's KV and of its blocks, which two nodes compare before the first byte is sent."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from baton.errors import LayoutMismatch

MAX_LAYERS = 2048
MAX_KV_HEADS = 2**16 - 1
MAX_RANKS = 64
QUANTIZED = ("float8_e4m3fn", "float8_e8m0fnu")
"""dtype and scale_dtype of quantized KV, into which that of the other dtypes below can be converted."""
QUANTIZED_TOKENS = 8
"""Blocks of quantized KV have a multiple of so many tokens, so that pieces of blocks are whole words for checksums."""
_CONVERTIBLE = {("float32", ""), ("float16", ""), ("bfloat16", "")}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer stores for a sequence: for each token K `[num_kv_heads, head_dim_k]` and V `[num_kv_heads,
    head_dim_v]`, of `dtype`.

    head_dim_v 0: only K (MLA's latent). sliding_window: how far back attention looks; None: no limit. state_bytes: the
    layer stores a state of this fixed size instead, and nothing per token (recurrent layers). scale_dtype: of the
    scale that each token has for each head of its K, and of its V; empty: no scales. Raises ValueError for a dtype
    whose name does not give its size.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    sliding_window: int | None = None
    state_bytes: int = 0
    scale_dtype: str = ""

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        if self.scale_dtype:
            dtype_bytes(self.scale_dtype)

    @property
    def form(self) -> tuple[str, str]:
        """How a number is stored: dtype and scale_dtype."""
        return self.dtype, self.scale_dtype

    def head_bytes(self, block_size: int) -> int:
        """Bytes of one head's K and V of `block_size` tokens, with their scales."""
        scale_bytes = dtype_bytes(self.scale_dtype) if self.scale_dtype else 0
        widths = [width for width in (self.head_dim_k, self.head_dim_v) if width]
        return block_size * sum(width * dtype_bytes(self.dtype) + scale_bytes for width in widths)


class KvSlice(NamedTuple):
    """The KV heads [head_start, head_end) of the model's layers [layer_start, layer_end)."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_end - self.head_start

    def overlap(self, other: KvSlice) -> KvSlice | None:
        """The intersection, or None if it is empty."""
        layers = max(self.layer_start, other.layer_start), min(self.layer_end, other.layer_end)
        heads = max(self.head_start, other.head_start), min(self.head_end, other.head_end)
        return KvSlice(*layers, *heads) if layers[0] < layers[1] and heads[0] < heads[1] else None


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV blocks of a node, which has one pool for each of its ranks.

    layers: of the whole model. block_size: tokens per block. fingerprint: covers the model's configuration and weights,
    since caches of two fine-tunes of the same shape must never mix. ranks: what each rank's pool holds; a block there
    is, layer by layer, K then V of these heads, `[heads held, block_size, head_dim]` each, contiguous. With scales, a
    head's `[block_size, head_dim]` is followed by the scales of its `block_size` tokens. Any two ranks hold the same
    slice or disjoint ones, and together they hold everything; empty: one rank holds everything.

    groups: the layers of each group in their order (`baton.kv_groups`), which gives back what is behind its window. A
    block has the layers of one group, on each rank those that the rank holds, and what it has beyond these, if others
    have more, means nothing. Layers of several groups differ in nothing but their windows, which are the same within a
    group. Empty: one group of all layers, which keeps everything.

    Raises ValueError for layers, groups and ranks that violate this.
    """

    layers: tuple[LayerKv, ...]
    block_size: int
    fingerprint: str
    ranks: tuple[KvSlice, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.layers) <= MAX_LAYERS or not 0 < self.num_kv_heads <= MAX_KV_HEADS or self.block_size < 1:
            raise ValueError(f"{len(self.layers)} layers, {self.num_kv_heads} KV heads, block_size {self.block_size}")
        if self.groups:
            _require_groups(self.layers, self.groups)
        if not self.ranks:
            object.__setattr__(self, "ranks", (self.whole,))
        _require_division(self.whole, self.ranks)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.layers)

    @property
    def layers_of_groups(self) -> tuple[tuple[int, ...], ...]:
        """Of the one group, too."""
        return self.groups or (tuple(range(len(self.layers))),)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group, how many tokens' KV is kept; None: that of all."""
        return tuple(self.layers[group[0]].sliding_window for group in self.groups) or (None,)

    def runs_of(self, what: KvSlice) -> tuple[range, ...]:
        """For each group which of its layers, counted in the group, are in the slice."""
        if not self.groups:
            return (range(what.layer_start, what.layer_end),)
        bounds = what.layer_start, what.layer_end
        return tuple(range(*(bisect.bisect_left(group, bound) for bound in bounds)) for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        """The largest number of KV heads of any layer."""
        return max((layer.num_kv_heads for layer in self.layers), default=0)

    @property
    def whole(self) -> KvSlice:
        return KvSlice(0, self.num_layers, 0, self.num_kv_heads)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block where one rank holds everything."""
        return self.num_bytes(self.whole)

    @property
    def rank_block_bytes(self) -> int:
        """Bytes of a block on the rank that holds the most."""
        return max(map(self.num_bytes, self.ranks))

    @property
    def has_equal_runs(self) -> bool:
        """Whether a head's K and V each have the same number of bytes in every layer, so that the heads of a block can
        be divided among ranks."""
        shapes = {
            (layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v, layer.dtype, layer.scale_dtype)
            for layer in self.layers
        }
        return len(shapes) == 1 and all(v in (0, k) for _, k, v, *_ in shapes)

    def num_bytes(self, what: KvSlice) -> int:
        """Bytes of a slice of one block, of the group that has the most layers in it. A layer with fewer heads
        contributes those that it has."""
        if self.groups:  # layers are alike
            most = max(map(len, self.runs_of(what)))
            return most * what.num_heads * self.layers[0].head_bytes(self.block_size)
        return sum(
            (min(what.head_end, layer.num_kv_heads) - min(what.head_start, layer.num_kv_heads))
            * layer.head_bytes(self.block_size)
            for layer in self.layers[what.layer_start : what.layer_end]
        )

    def require_compatible(self, other: KvLayout, who: str) -> None:
        """Raise LayoutMismatch unless blocks of `other`, the layout of node `who`, hold the same as these, regardless
        of how either divides them among ranks, and of whether one of them is quantized. The text gives the first
        difference as `field mine != theirs`."""

        def require(field: str, mine: object, theirs: object, where: str = "") -> None:
            if mine != theirs:
                raise LayoutMismatch(f"{field}{where} {mine} != {theirs} of {who}")

        require("num_layers", len(self.layers), len(other.layers))
        for field in ("block_size", "fingerprint", "windows", "groups"):
            require(field, getattr(self, field), getattr(other, field))
        converts = self.converts(other)
        for index, (mine, layer) in enumerate(zip(self.layers, other.layers, strict=True)):
            theirs = layer
            if converts:
                theirs = dataclasses.replace(layer, dtype=mine.dtype, scale_dtype=mine.scale_dtype)
            if mine != theirs:
                for part in dataclasses.fields(LayerKv):
                    require(part.name, getattr(mine, part.name), getattr(theirs, part.name), f" of layer {index}")
        if not self.has_equal_runs and any(rank.num_heads < self.num_kv_heads for rank in self.ranks + other.ranks):
            raise LayoutMismatch(f"ranks divide heads of layers that differ, here or at {who}")

    def sent(self, other: KvLayout) -> KvLayout:
        """This layout with its layers as they are sent between it and `other`, which must be compatible: quantized, if
        either is."""
        narrow = next((layout for layout in (self, other) if layout.layers[0].form == QUANTIZED), self)
        return dataclasses.replace(self, layers=narrow.layers)

    def converts(self, other: KvLayout) -> bool:
        """Whether one of them is quantized, and all layers of the other can be."""
        forms = {layer.form for layer in self.layers}, {layer.form for layer in other.layers}
        one_is = {QUANTIZED} in forms and forms[0] != forms[1] and all(len(kinds) == 1 for kinds in forms)
        can_be = (forms[0] | forms[1]) - {QUANTIZED} <= _CONVERTIBLE and self.has_equal_runs
        return one_is and can_be and self.block_size % QUANTIZED_TOKENS == 0

    def digest(self) -> bytes:
        """16 bytes for the header of every part; equal for compatible layouts as they are sent."""
        groups = (self.groups,) if self.groups else ()
        return hashlib.sha256(repr((self.layers, self.block_size, self.fingerprint, *groups)).encode()).digest()[:16]


def _require_groups(layers: Sequence[LayerKv], groups: Sequence[Sequence[int]]) -> None:
    if sorted(itertools.chain.from_iterable(groups)) != list(range(len(layers))) or not all(groups):
        raise ValueError(f"{len(layers)} layers are not divided by the groups {groups}")
    if any(sorted(group) != list(group) for group in groups):
        raise ValueError("the layers of a group are not in their order")
    if len({dataclasses.replace(layer, sliding_window=None) for layer in layers}) > 1:
        raise ValueError(f"layers of {len(groups)} KV groups differ in more than their windows")
    if any(len({layers[index].sliding_window for index in group}) > 1 for group in groups):
        raise ValueError("layers of a group have different windows")


def _require_division(whole: KvSlice, ranks: tuple[KvSlice, ...]) -> None:
    if len(ranks) > MAX_RANKS:
        raise ValueError(f"{len(ranks)} ranks are more than {MAX_RANKS}")
    held = set(ranks)
    if any(rank.overlap(whole) != rank for rank in held):
        raise ValueError(f"a rank holds what the model does not have: {sorted(held)}")
    if any(one.overlap(other) for one, other in itertools.combinations(held, 2)):
        raise ValueError(f"ranks hold parts of the same: {sorted(held)}")
    if sum(rank.num_layers * rank.num_heads for rank in held) != whole.num_layers * whole.num_heads:
        raise ValueError(f"ranks do not hold the whole model: {sorted(held)}")


def as_quantized(layer: LayerKv) -> LayerKv:
    """The layer with its KV in 8 bits, see `baton_kernels.fp8_kv`."""
    dtype, scale_dtype = QUANTIZED
    return dataclasses.replace(layer, dtype=dtype, scale_dtype=scale_dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes per element: 2 for `bfloat16`. Raises ValueError for a name that does not give the size."""
    if not (found := re.fullmatch(r"[a-z]{1,16}(8|16|32|64)(_\w{1,16})?", dtype)):
        raise ValueError(f"dtype {dtype!r} does not tell its size")
    return int(found[1]) // 8


def layer_groups_of(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """`num_groups` runs of layers, [first, end) each, as equal as possible, larger ones first; at most `num_layers`."""
    groups = max(1, min(num_groups, num_layers))
    size, larger = divmod(num_layers, groups)
    bounds = [index * size + min(index, larger) for index in range(groups + 1)]
    return list(itertools.pairwise(bounds))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
