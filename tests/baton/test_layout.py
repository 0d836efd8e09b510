"""How two nodes compare their blocks, and how layers and tokens are divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import LayoutMismatch
from baton.layout import KvLayout, KvSlice, LayerKv, as_quantized, dtype_bytes, layer_groups_of, num_blocks_for

LAYOUT = KvLayout((LayerKv(2, 32, 32, "float32"),) * 4, 16, "fingerprint")


LAYER = LAYOUT.layers[0]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("num_layers", dataclasses.replace(LAYOUT, layers=LAYOUT.layers[:3], ranks=())),
        ("block_size", dataclasses.replace(LAYOUT, block_size=32)),
        ("fingerprint", dataclasses.replace(LAYOUT, fingerprint="of another")),
    ],
)
def test_a_difference_between_models_is_named(field: str, other: KvLayout) -> None:
    mine, theirs = getattr(LAYOUT, field), getattr(other, field)
    with pytest.raises(LayoutMismatch, match=f"^{field} {mine} != {theirs} of the node$"):
        LAYOUT.require_compatible(other, "the node")
    assert LAYOUT.digest() != other.digest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 1),
        ("head_dim_k", 64),
        ("head_dim_v", 0),
        ("dtype", "bfloat16"),
        ("sliding_window", 512),
        ("state_bytes", 64),
    ],
)
def test_a_difference_in_a_layer_is_named(field: str, value: object) -> None:
    change: dict[str, Any] = {field: value}
    changed = dataclasses.replace(LAYER, **change)
    other = dataclasses.replace(LAYOUT, layers=(LAYER, LAYER, changed, LAYER), ranks=())
    text = f"^{field} of layer 2 {getattr(LAYER, field)} != {value} of the node$"
    with pytest.raises(LayoutMismatch, match=text):
        LAYOUT.require_compatible(other, "the node")
    assert LAYOUT.digest() != other.digest()


SPLIT = KvLayout(
    tuple(dataclasses.replace(LAYER, sliding_window=window) for window in (None, 8, None, 8)),
    16,
    "fingerprint",
    groups=((0, 2), (1, 3)),
)
"""Two groups, whose blocks have two layers each."""


def test_blocks_of_other_groups_are_other_blocks() -> None:
    together = dataclasses.replace(SPLIT, groups=(), ranks=())
    with pytest.raises(LayoutMismatch, match=r"^windows \(None, 8\) != \(None,\) of the node$"):
        SPLIT.require_compatible(together, "the node")
    crossed = dataclasses.replace(
        SPLIT, layers=(SPLIT.layers[0],) * 2 + (SPLIT.layers[1],) * 2, groups=((0, 1), (2, 3))
    )
    with pytest.raises(LayoutMismatch, match=r"^groups "):
        SPLIT.require_compatible(crossed, "the node")
    assert SPLIT.digest() != together.digest()
    assert (SPLIT.whole, SPLIT.windows) == (KvSlice(0, 4, 0, 2), (None, 8))
    assert 2 * SPLIT.block_bytes == together.block_bytes
    assert together.windows == (None,)


def test_a_rank_that_has_some_layers_has_some_of_each_group() -> None:
    """A block there is as large as that of the group with the most."""
    ranks = KvSlice(0, 3, 0, 2), KvSlice(3, 4, 0, 2)
    split = dataclasses.replace(SPLIT, ranks=ranks)
    assert [split.runs_of(held) for held in ranks] == [(range(2), range(1)), (range(2, 2), range(1, 2))]
    assert [split.num_bytes(held) for held in ranks] == [split.block_bytes, split.block_bytes // 2]
    assert split.rank_block_bytes == split.block_bytes
    with pytest.raises(ValueError, match="do not hold the whole model"):
        dataclasses.replace(SPLIT, ranks=(KvSlice(0, 2, 0, 2),))


def test_whether_what_is_behind_the_only_window_is_kept_is_compared() -> None:
    kv = (dataclasses.replace(LAYER, sliding_window=8),) * 4
    kept, given_back = KvLayout(kv, 16, ""), KvLayout(kv, 16, "", groups=((0, 1, 2, 3),))
    with pytest.raises(LayoutMismatch, match=r"^windows \(None,\) != \(8,\) of the node$"):
        kept.require_compatible(given_back, "the node")
    assert kept.digest() != given_back.digest()


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (((0, 2), (1,)), "not divided"),
        (((0, 2), (1, 3), ()), "not divided"),
        (((0, 2), (1, 3, 3)), "not divided"),
        (((0, 1), (2, 3)), "different windows"),
        (((2, 0), (1, 3)), "not in their order"),
    ],
)
def test_groups_must_divide_the_layers(groups: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(SPLIT, groups=groups, ranks=())
    wide = dataclasses.replace(LAYER, num_kv_heads=1)
    with pytest.raises(ValueError, match="more than their windows"):
        KvLayout((LAYER, wide), 16, "", groups=((0,), (1,)))


QUANTIZED = dataclasses.replace(LAYOUT, layers=tuple(map(as_quantized, LAYOUT.layers)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_of_two_nodes_may_be_quantized(dtype: str) -> None:
    layers = tuple(dataclasses.replace(layer, dtype=dtype) for layer in LAYOUT.layers)
    plain = dataclasses.replace(LAYOUT, layers=layers)
    for mine, theirs in ((plain, QUANTIZED), (QUANTIZED, plain)):
        mine.require_compatible(theirs, "the node")
        assert mine.sent(theirs).layers == QUANTIZED.layers
        assert mine.sent(theirs).digest() == QUANTIZED.digest() != plain.digest()
    assert plain.sent(plain) == plain
    assert QUANTIZED.block_bytes < plain.block_bytes


def test_quantized_layers_differ_from_others_in_nothing_else() -> None:
    wider = dataclasses.replace(LAYOUT, layers=tuple(dataclasses.replace(x, head_dim_k=64) for x in LAYOUT.layers))
    integers = dataclasses.replace(LAYOUT, layers=tuple(dataclasses.replace(x, dtype="int8") for x in LAYOUT.layers))
    partly = dataclasses.replace(LAYOUT, layers=(as_quantized(LAYER), *LAYOUT.layers[1:]))
    for other, field in ((wider, "head_dim_k"), (integers, "dtype"), (partly, "dtype")):
        with pytest.raises(LayoutMismatch, match=f"^{field} "):
            QUANTIZED.require_compatible(other, "the node")


HEADS = (KvSlice(0, 4, 0, 1), KvSlice(0, 4, 1, 2))
LAYERS = (KvSlice(0, 3, 0, 2), KvSlice(3, 4, 0, 2))


@pytest.mark.parametrize("ranks", [(), HEADS, LAYERS, HEADS + HEADS])
def test_nodes_may_divide_a_model_among_ranks_as_they_like(ranks: tuple[KvSlice, ...]) -> None:
    divided = dataclasses.replace(LAYOUT, ranks=ranks)
    LAYOUT.require_compatible(divided, "the node")
    divided.require_compatible(LAYOUT, "the node")
    assert LAYOUT.digest() == divided.digest()
    assert divided.block_bytes == LAYOUT.block_bytes
    assert sum(map(LAYOUT.num_bytes, set(divided.ranks))) == LAYOUT.block_bytes
    assert divided.rank_block_bytes == max(map(LAYOUT.num_bytes, divided.ranks)) <= LAYOUT.block_bytes


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (HEADS[:1], "do not hold the whole"),
        ((KvSlice(0, 4, 0, 2), KvSlice(0, 4, 1, 2)), "hold parts of the same"),
        ((KvSlice(0, 5, 0, 2),), "what the model does not have"),
        ((KvSlice(0, 0, 0, 2), *HEADS), "what the model does not have"),
        (HEADS * 33, "more than 64"),
    ],
)
def test_ranks_hold_the_whole_model_and_nothing_in_part_twice(ranks: tuple[KvSlice, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(LAYOUT, ranks=ranks)


def test_layers_may_differ_but_then_ranks_do_not_divide_heads() -> None:
    """What a model is like whose layers are of several kinds has a place to be said."""
    window = LayerKv(2, 32, 32, "float32", sliding_window=128)
    latent = LayerKv(1, 576, 0, "bfloat16")
    state = LayerKv(0, 0, 0, "float32", state_bytes=4096)
    mixed = KvLayout((LAYER, window, latent, state), 16, "fingerprint")
    assert mixed.block_bytes == 2 * (2 * 2 * 16 * 32 * 4) + 16 * 576 * 2
    assert [mixed.num_bytes(KvSlice(i, i + 1, 0, 1)) for i in range(4)] == [4096, 4096, 18432, 0]
    mixed.require_compatible(mixed, "the node")
    mixed.require_compatible(dataclasses.replace(mixed, ranks=(KvSlice(0, 1, 0, 2), KvSlice(1, 4, 0, 2))), "the node")
    with pytest.raises(LayoutMismatch, match="ranks divide heads of layers that differ"):
        mixed.require_compatible(dataclasses.replace(mixed, ranks=HEADS), "the node")


@pytest.mark.parametrize(("name", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8)])
def test_the_name_of_a_dtype_tells_its_size(name: str, num_bytes: int) -> None:
    assert dtype_bytes(name) == num_bytes


@pytest.mark.parametrize("name", ["", "float", "float31", "32", "bfloat16 "])
def test_a_name_that_tells_no_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="does not tell its size"):
        LayerKv(1, 1, 1, name)


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "groups"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (2, 5, [(0, 1), (1, 2)]),
        (5, 1, [(0, 5)]),
        (5, 0, [(0, 5)]),
    ],
)
def test_groups_of_layers_cover_each_layer_once(
    num_layers: int, num_groups: int, groups: list[tuple[int, int]]
) -> None:
    assert layer_groups_of(num_layers, num_groups) == groups


def test_a_block_that_is_begun_counts() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
