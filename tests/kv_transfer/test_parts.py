"""Headers and tags of parts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import LayoutMismatch, TransferError
from baton.layout import KvLayout, KvSlice, LayerKv
from kv_transfer.parts import (
    HEADER_BYTES,
    LEASE_BITS,
    MAX_PIECES,
    PART_BITS,
    PartHeader,
    PartPlanner,
    PlannedPart,
    part_blocks_for,
    slot_bytes_for,
    tag_of,
)
from kv_transfer.transport import TAG_BITS
from tests.kv_transfer.rig_node import LAYOUT, OTHER_LAYOUT

LAYER = KvSlice(1, 2, 0, 2)
leases = st.integers(0, (1 << LEASE_BITS) - 1)
parts = st.integers(0, (1 << PART_BITS) - 1)
headers = st.builds(
    PartHeader,
    lease=leases,
    part=parts,
    num_blocks=st.integers(0, 2**32 - 1),
    kv_slice=st.builds(KvSlice, *[st.integers(0, 2**16 - 1)] * 4),
    num_pieces=st.integers(0, MAX_PIECES),
    piece_bytes=st.integers(1, 2**29 - 1).map(lambda words: 8 * words),  # so that they can have checksums
    layout_digest=st.binary(min_size=16, max_size=16),
    checked=st.booleans(),
    drain=st.booleans(),
)


@given(headers)
def test_a_header_survives_the_way(header: PartHeader) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert PartHeader.parse(data) == header


@pytest.mark.parametrize(("lease", "part"), [(1 << LEASE_BITS, 0), (0, 1 << PART_BITS)])
def test_a_header_of_a_part_that_no_tag_can_name_is_refused(lease: int, part: int) -> None:
    header = PartHeader(lease, part, 1, LAYOUT.whole, 1, 8, LAYOUT.digest())
    with pytest.raises(TransferError, match="beyond 39 and 23 bits"):
        PartHeader.parse(header.pack())


@given(headers, st.integers(0, 63), st.integers(1, 255))
def test_a_damaged_header_is_refused(header: PartHeader, position: int, change: int) -> None:
    data = bytearray(header.pack())
    data[position] ^= change
    with pytest.raises(TransferError):
        PartHeader.parse(bytes(data))


@given(st.binary(max_size=130))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransferError):
        PartHeader.parse(data)


@given(leases, parts, leases, parts)
def test_tags_tell_parts_apart(lease: int, part: int, other_lease: int, other_part: int) -> None:
    tag, other = tag_of(lease, part), tag_of(other_lease, other_part)
    assert 0 <= tag < 1 << TAG_BITS
    assert (tag == other) == ((lease, part) == (other_lease, other_part))


@pytest.mark.parametrize(("lease", "part"), [(-1, 0), (1 << LEASE_BITS, 0), (0, -1), (0, 1 << PART_BITS)])
def test_what_no_tag_can_name_is_refused(lease: int, part: int) -> None:
    with pytest.raises(TransferError, match="bits"):
        tag_of(lease, part)


@given(st.integers(0, 10_000), st.integers(1, 1 << 24), st.integers(0, MAX_PIECES))
def test_a_slot_holds_the_blocks_that_it_was_made_for(part_blocks: int, block_bytes: int, spare: int) -> None:
    size = slot_bytes_for(part_blocks, block_bytes)
    assert part_blocks_for(size + min(spare, block_bytes - 1), block_bytes) == part_blocks
    assert part_blocks_for(size - 1, block_bytes) == max(0, part_blocks - 1)


@pytest.mark.parametrize(("num_pieces", "piece_bytes"), [(MAX_PIECES + 1, 8), (1, 12), (5, 0)])
def test_pieces_that_cannot_have_checksums_are_refused(num_pieces: int, piece_bytes: int) -> None:
    header = PartHeader(1, 0, 1, LAYOUT.whole, num_pieces, piece_bytes, LAYOUT.digest(), checked=True)
    with pytest.raises(TransferError, match=f"{num_pieces} pieces of {piece_bytes} bytes cannot have checksums"):
        PartHeader.parse(header.pack())


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": 8},
        {"part": 4},
        {"num_blocks": 1},
        {"kv_slice": LAYOUT.whole},
        {"num_pieces": 2, "piece_bytes": 512},
        {"drain": True},
    ],
)
def test_only_exactly_the_expected_part_is_taken(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "lease": 7,
        "part": 3,
        "num_blocks": 2,
        "kv_slice": LAYER,
        "num_pieces": 4,
        "piece_bytes": 1024,
    }
    wanted = 7, 3, 2, LAYER, 4096
    PartHeader(**fields, layout_digest=LAYOUT.digest()).require(*wanted, LAYOUT.digest())
    with pytest.raises(TransferError, match="expected"):
        PartHeader(**(fields | changes), layout_digest=LAYOUT.digest()).require(*wanted, LAYOUT.digest())
    with pytest.raises(LayoutMismatch):
        PartHeader(**fields, layout_digest=OTHER_LAYOUT.digest()).require(*wanted, LAYOUT.digest())


# ---- which parts there are ----


def divided(layers: Sequence[int], heads: Sequence[int]) -> tuple[KvSlice, ...]:
    """Ranks between these bounds of layers and heads: each pair of runs is one's."""
    runs = itertools.product(itertools.pairwise(layers), itertools.pairwise(heads))
    return tuple(KvSlice(*of_layers, *of_heads) for of_layers, of_heads in runs)


DIVISIONS = {
    "one": (),
    "heads": divided([0, 6], [0, 2, 4]),
    "each head": divided([0, 6], range(5)),
    "layers": divided([0, 4, 6], [0, 4]),
    "both": divided([0, 3, 6], [0, 1, 4]),
    "twice": divided([0, 6], [0, 2, 4]) * 2,
}


@pytest.mark.parametrize("receiver", DIVISIONS)
@pytest.mark.parametrize("sender", DIVISIONS)
@given(
    part_blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    first=st.integers(0, 6),
    num_blocks=st.integers(0, 12),
    grouped_from=st.integers(0, 20),
    num_groups=st.integers(1, 9),
)
@settings(max_examples=15)
def test_the_parts_of_a_plan_bring_each_rank_all_that_it_holds_once_and_fit_slots(
    sender: str,
    receiver: str,
    part_blocks: tuple[int, int],
    first: int,
    num_blocks: int,
    grouped_from: int,
    num_groups: int,
) -> None:
    layers = (LayerKv(4, 3, 3, "float32"),) * 6
    ends = KvLayout(layers, 2, "f", DIVISIONS[sender]), KvLayout(layers, 2, "f", DIVISIONS[receiver])
    planner, end = PartPlanner(*ends, part_blocks), first + num_blocks
    carried = Counter[tuple[int, int, int, int]]()
    last_layer: dict[tuple[int, int], int] = {}
    for number, part in enumerate(planner.plan(first, end, grouped_from, num_groups)):
        ranks = part.source, part.target
        assert planner.pair_of(number)[:2] == ranks
        assert part.num_bytes == ends[0].num_bytes(part.kv_slice)
        assert part.end_layer == part.kv_slice.layer_end
        for layout, rank, most in zip(ends, ranks, part_blocks, strict=True):
            assert part.kv_slice.overlap(layout.ranks[rank]) == part.kv_slice
            assert 0 < part.num_blocks * part.num_bytes <= most * layout.num_bytes(layout.ranks[rank])
        for block, layer, head in itertools.product(
            range(part.first, part.first + part.num_blocks),
            range(part.kv_slice.layer_start, part.kv_slice.layer_end),
            range(part.kv_slice.head_start, part.kv_slice.head_end),
        ):
            carried[block, layer, head, part.target] += 1
        if part.first >= grouped_from and num_groups > 1:
            assert part.end_layer >= last_layer.get(ranks, 0), "a later group goes before an earlier one"
            last_layer[ranks] = part.end_layer
    assert carried == Counter(
        (block, layer, head, rank)
        for block in range(first, end)
        for rank, held in enumerate(ends[1].ranks)
        for layer in range(held.layer_start, held.layer_end)
        for head in range(held.head_start, held.head_end)
    )


@pytest.mark.parametrize("num_groups", [1, 3])
def test_one_rank_has_a_part_for_as_many_blocks_as_fit(num_groups: int) -> None:
    layout = KvLayout((LayerKv(4, 3, 3, "float32"),) * 6, 2, "f")
    found = [(part.first, part.num_blocks, part.kv_slice[:2]) for part in plan(layout, 2, 0, 7, 3, num_groups)]
    whole = [(0, 2, (0, 6)), (2, 1, (0, 6))]
    if num_groups == 1:
        assert found == [(0, 2, (0, 6)), (2, 2, (0, 6)), (4, 2, (0, 6)), (6, 1, (0, 6))]
    else:  # a third of a block's layers, of up to six blocks
        assert found == whole + [(3, 4, (start, start + 2)) for start in (0, 2, 4)]


def test_slots_of_either_end_count_with_what_its_ranks_hold_of_a_block() -> None:
    layers = (LayerKv(4, 3, 3, "float32"),) * 6
    whole, halves = KvLayout(layers, 2, "f"), KvLayout(layers, 2, "f", divided([0, 6], [0, 2, 4]))
    for ends, part_blocks in (((whole, halves), (2, 4)), ((halves, whole), (4, 2))):
        parts = PartPlanner(*ends, part_blocks).plan(0, 8)
        assert [part.num_blocks for part in parts] == [4] * 4, "as many bytes as a slot of either end has"


def plan(layout: KvLayout, part_blocks: int, *where: int) -> tuple[PlannedPart, ...]:
    return PartPlanner(layout, layout, (part_blocks, part_blocks)).plan(*where)


def test_layers_of_unlike_size_go_by_groups_too() -> None:
    layers = (LayerKv(1, 4, 4, "float32"), LayerKv(1, 4, 0, "float32"), LayerKv(1, 1, 1, "float32"))
    layout = KvLayout(layers, 1, "f")
    assert [(p.num_blocks, p.num_bytes) for p in plan(layout, 1, 0, 4, 0, 3)] == [
        *[(1, 32)] * 4, (3, 16), (1, 16), (4, 8)
    ]  # fmt: skip


def test_no_part_has_more_pieces_than_a_slot_has_checksums_for() -> None:
    layers = (LayerKv(2, 1, 1, "int8"),) * 2
    layout, end = KvLayout(layers, 1, "f"), 2 * MAX_PIECES + 5
    assert [piece.num_blocks for piece in plan(layout, end, 0, end)] == [MAX_PIECES, MAX_PIECES, 5]
    grouped = plan(layout, MAX_PIECES, 0, end, 0, 2)
    assert [piece.num_blocks for piece in grouped] == [MAX_PIECES, MAX_PIECES, 5] * 2
    by_heads = KvLayout(layers, 1, "f", divided([0, 2], range(3)))
    for ends in ((layout, by_heads), (by_heads, layout)):
        pieces = PartPlanner(*ends, (end, end)).plan(0, MAX_PIECES)  # K and V of each layer lie apart in a whole block
        assert [piece.num_blocks for piece in pieces] == [MAX_PIECES // 4] * 8
