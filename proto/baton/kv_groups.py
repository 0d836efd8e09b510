"""Which layers of a model share a block. Layers of a group have the same window, and groups have equally many layers,
so that blocks of all groups have the same bytes and come from one pool (as in vLLM's hybrid KV cache manager).

gpt-oss, 24 layers, every other with a window of 128:  [0, 2, 4 ...] without, [1, 3, 5 ...] with the window
Gemma 3 12B, 48 layers, every sixth without a window:  8 without; five groups of 8 with a window of 1024
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from baton.layout import LayerKv

MAX_GROUPS = 8
"""More would cost more in tables than their blocks save."""
MAX_PADDING = 1 / 4
"""Of a block's layers that nothing is kept in, at most, where the numbers of layers do not divide."""


def group_layers(layers: Sequence[LayerKv]) -> tuple[tuple[int, ...], ...]:
    """The layers of each group: those without a window first, or else those with the longest. Empty, for one group that
    keeps everything, if no layer has a window, or if the layers cannot be divided well.

    A group has as many layers as there are without a window, or as near to that as leaves few places empty. Of a kind
    that fills several groups, every n-th layer is in the same one, so that the blocks of all groups are computed at
    about the same time.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.sliding_window, []).append(index)
    if kinds.keys() == {None} or len({dataclasses.replace(layer, sliding_window=None) for layer in layers}) > 1:
        return ()
    of_kinds = [kinds[window] for window in sorted(kinds, key=lambda window: (window is not None, -(window or 0)))]
    for size in range(len(of_kinds[0]), 0, -1):
        groups = [group for of_kind in of_kinds for group in _in_groups(of_kind, size)]
        if len(groups) <= MAX_GROUPS and len(groups) * size - len(layers) <= MAX_PADDING * len(layers):
            return tuple(groups)
    return ()


def _in_groups(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Of at most that size, as equal as can be."""
    num_groups = -(-len(layers) // size)
    return [tuple(layers[first::num_groups]) for first in range(num_groups)]
