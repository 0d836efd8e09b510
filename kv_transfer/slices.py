"""Maps slices of the model's KV to rows of the ranks' pools, and pairs the ranks that exchange slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.layout import KvLayout, KvSlice


class Rows(NamedTuple):
    """A slice in one rank's pool, viewed as `per_block` rows per block. It consists of the bytes [offset, offset +
    row_bytes) of a block's rows `runs[group]`, where `group` is the block's KV group; if there is only one run, it
    holds for all groups. In this order, these rows make up the slice. A row is sent as `sent_bytes` bytes.
    is_converted: rows are sent in another form than in the pool, which may have the same number of bytes."""

    per_block: int
    runs: tuple[range, ...]
    offset: int
    row_bytes: int
    sent_bytes: int
    is_converted: bool

    @property
    def most(self) -> int:
        """The most rows of one block."""
        return max(map(len, self.runs))

    def of(self, blocks: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        """The pool's rows that hold the slice of these blocks. groups: the KV group of each block."""
        if len(self.runs) == 1:
            if self.per_block == 1:
                return blocks
            groups = [0] * len(blocks)
        return [
            block * self.per_block + row
            for block, group in zip(blocks, groups, strict=True)
            for row in self.runs[group]
        ]


def rows_of(layout: KvLayout, rank: int, kv_slice: KvSlice, sent: KvLayout) -> Rows:
    """The rows of `kv_slice` in that rank's pool, which must hold all of it. If the slice has all heads that the rank
    holds, there is one row per block, or one per layer if blocks of different KV groups have the slice at different
    places. Otherwise there is one row for each layer's K and V, which requires `layout.has_equal_runs`. sent: the
    layout as it is sent."""
    held = layout.ranks[rank]
    assert kv_slice.overlap(held) == kv_slice
    is_converted = sent.layers[0].form != layout.layers[0].form
    pairs = zip(layout.runs_of(kv_slice), layout.runs_of(held), strict=True)
    runs = tuple(range(of_slice.start - own.start, of_slice.stop - own.start) for of_slice, own in pairs)
    has_all_heads, is_same = kv_slice[2:] == held[2:], len({(run.start, run.stop) for run in runs}) == 1
    if has_all_heads and is_same:
        offset = layout.num_bytes(held._replace(layer_end=kv_slice.layer_start))
        return Rows(1, (range(1),), offset, layout.num_bytes(kv_slice), sent.num_bytes(kv_slice), is_converted)
    assert has_all_heads or layout.has_equal_runs
    per_layer = 2 if layout.layers[0].head_dim_v and not has_all_heads else 1
    per_block = max(map(len, layout.runs_of(held))) * per_layer
    head_bytes = layout.num_bytes(held) // per_block // held.num_heads
    return Rows(
        per_block=per_block,
        runs=tuple(range(run.start * per_layer, run.stop * per_layer) for run in (runs[:1] if is_same else runs)),
        offset=(kv_slice.head_start - held.head_start) * head_bytes,
        row_bytes=kv_slice.num_heads * head_bytes,
        sent_bytes=sent.num_bytes(kv_slice) // (max(map(len, runs)) * per_layer),
        is_converted=is_converted,
    )


class RankPair(NamedTuple):
    """Ranks of two nodes: `source` sends and `target` receives `kv_slice`."""

    source: int
    target: int
    kv_slice: KvSlice


def pair_ranks(sender: KvLayout, receiver: KvLayout) -> tuple[RankPair, ...]:
    """The pairs of ranks through which each rank of the receiver gets everything that it holds exactly once. If several
    ranks of the sender hold the same slice, the first one sends it. The layouts must be compatible."""
    sources = {held: rank for rank, held in reversed(list(enumerate(sender.ranks)))}
    return tuple(
        RankPair(source, target, kv_slice)
        for target, wanted in enumerate(receiver.ranks)
        for held, source in sorted(sources.items(), key=lambda entry: entry[1])
        if (kv_slice := held.overlap(wanted)) is not None
    )
