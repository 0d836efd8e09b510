"""Which layers of the models that there are share a block."""

from __future__ import annotations

import itertools

import pytest

from baton.kv_groups import MAX_GROUPS, group_layers
from baton.layout import KvLayout, KvSlice, LayerKv


def kv(*windows: int | None) -> tuple[LayerKv, ...]:
    return tuple(LayerKv(4, 64, 64, "bfloat16", window) for window in windows)


@pytest.mark.parametrize(
    ("windows", "sizes", "of_groups"),
    [
        ((None,) * 4, [], (None,)),
        ((4096,) * 32, [32], (4096,)),  # Mistral
        ((128, None) * 12, [12, 12], (None, 128)),  # gpt-oss
        (((1024,) * 5 + (None,)) * 8, [8] * 6, (None,) + (1024,) * 5),  # Gemma 3 12B
        (((1024,) * 5 + (None,)) * 10 + (1024,) * 2, [10, 9, 9, 9, 9, 8, 8], (None,) + (1024,) * 6),  # 27B
        ((64, 64, 32, 32), [2, 2], (64, 32)),
        (
            (None, 128, None, None, None),
            [2, 2, 1],
            (None, None, 128),
        ),  # baton-tiny-moe: of four, three places were empty
        ((None, None, None, 64), [1] * 4, (None, None, None, 64)),  # of three or two, two were
        ((None, *(64,) * 9, *(32,) * 7), [], (None,)),  # seventeen groups are too many
        ((None, *(64,) * 8), [], (None,)),  # nine groups are too many
    ],
)
def test_layers_with_one_window_share_blocks(
    windows: tuple[int | None, ...], sizes: list[int], of_groups: tuple[int | None, ...]
) -> None:
    groups = group_layers(kv(*windows))
    assert [len(group) for group in groups] == sizes
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(windows) if groups else 0))
    layout = KvLayout(kv(*windows), 16, "", groups=groups)  # which checks the rest
    assert layout.windows == of_groups
    per_block = max(sizes, default=len(windows))
    assert layout.block_bytes == per_block * layout.layers[0].head_bytes(16) * 4
    assert len(groups) <= MAX_GROUPS


def test_layers_of_different_shapes_stay_together() -> None:
    layers = (*kv(None, 64), LayerKv(2, 64, 64, "bfloat16", 64), *kv(None))
    assert group_layers(layers) == ()


def test_blocks_of_all_groups_are_computed_at_about_the_same_time() -> None:
    """Of the layers with a window every n-th is in the same group, so that stages have as many of each."""
    groups = group_layers(kv(*((1024,) * 5 + (None,)) * 8))
    assert groups[:2] == (tuple(range(5, 48, 6)), tuple(range(0, 48, 6)))
    layout = KvLayout(kv(*((1024,) * 5 + (None,)) * 8), 16, "", groups=groups)
    halves = KvSlice(0, 24, 0, 4), KvSlice(24, 48, 0, 4)
    assert [layout.runs_of(half) for half in halves] == [(range(4),) * 6, (range(4, 8),) * 6]
    assert [len(run) for run in layout.runs_of(KvSlice(0, 16, 0, 4))] == [2, 3, 3, 3, 3, 2]
