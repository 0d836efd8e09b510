"""Maps slices of the model's KV to rows of the ranks' pools, and pairs the ranks that exchange slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.layout import KvLayout, KvSlice


class Rows(NamedTuple):
    """A slice in one rank's pool, viewed as `per_block` rows per block: the bytes [offset, offset + row_bytes) of the
    rows [first, first + num) of a block. In that order they are the slice's bytes; sent, each has `sent_bytes`.
    is_converted: they are sent in another form than the pool has, which may have as many bytes."""

    per_block: int
    first: int
    num: int
    offset: int
    row_bytes: int
    sent_bytes: int
    is_converted: bool

    def of(self, blocks: Sequence[int]) -> Sequence[int]:
        """The pool's rows that hold the slice of these blocks."""
        if self.per_block == 1:
            return blocks
        firsts = (block * self.per_block + self.first for block in blocks)
        return [row for first in firsts for row in range(first, first + self.num)]


def rows_of(layout: KvLayout, rank: int, what: KvSlice, sent: KvLayout) -> Rows:
    """`what` in that rank's pool, which holds all of it: one row per block if it has all heads that the rank holds,
    else one for each layer's K and V. The second case requires `layout.has_equal_runs`. sent: the layout as it is
    sent."""
    held = layout.ranks[rank]
    assert what.overlap(held) == what
    block_bytes = layout.num_bytes(held)
    before = what.layer_start - held.layer_start
    is_converted = sent.layers[0].form != layout.layers[0].form
    if what[2:] == held[2:]:
        offset = layout.num_bytes(held._replace(layer_end=what.layer_start))
        sizes = layout.num_bytes(what), sent.num_bytes(what)
        return Rows(1, 0, 1, offset, *sizes, is_converted)
    assert layout.has_equal_runs
    runs = 2 if layout.layers[0].head_dim_v else 1
    per_block = held.num_layers * runs
    head_bytes = block_bytes // per_block // held.num_heads
    return Rows(
        per_block=per_block,
        first=before * runs,
        num=what.num_layers * runs,
        offset=(what.head_start - held.head_start) * head_bytes,
        row_bytes=what.num_heads * head_bytes,
        sent_bytes=sent.num_bytes(what) // (what.num_layers * runs),
        is_converted=is_converted,
    )


class RankPair(NamedTuple):
    """Ranks of two nodes: `source` sends and `target` receives `what`."""

    source: int
    target: int
    what: KvSlice


def pair_ranks(sender: KvLayout, receiver: KvLayout) -> tuple[RankPair, ...]:
    """The pairs by which each rank of the receiver gets all that it holds exactly once; of ranks that hold the same
    slice, the first sends. The layouts must be compatible."""
    sources = {held: rank for rank, held in reversed(list(enumerate(sender.ranks)))}
    return tuple(
        RankPair(source, target, what)
        for target, wanted in enumerate(receiver.ranks)
        for held, source in sorted(sources.items(), key=lambda entry: entry[1])
        if (what := held.overlap(wanted)) is not None
    )
