"""Headers and tags of parts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import LayoutMismatch, TransferError
from kv_transfer.parts import (
    HEADER_BYTES,
    LEASE_BITS,
    MAX_PIECES,
    PART_BITS,
    PartHeader,
    part_blocks_for,
    plan_parts,
    slot_bytes_for,
    tag_of,
    untag,
)
from kv_transfer.transport import TAG_BITS
from tests.kv_transfer.rig_node import LAYOUT, OTHER_LAYOUT

leases = st.integers(0, (1 << LEASE_BITS) - 1)
parts = st.integers(0, (1 << PART_BITS) - 1)
headers = st.builds(
    PartHeader,
    lease=leases,
    part=parts,
    num_blocks=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**32 - 1),
    piece_bytes=st.integers(0, 2**32 - 1),
    layout_digest=st.binary(min_size=16, max_size=16),
    checked=st.booleans(),
    drain=st.booleans(),
)


@given(headers)
def test_a_header_survives_the_way(header: PartHeader) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert PartHeader.parse(data) == header


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
    assert untag(tag) == (lease, part)
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


@pytest.mark.parametrize(
    "changes",
    [{"lease": 8}, {"part": 4}, {"num_blocks": 1}, {"offset": 0}, {"piece_bytes": 2048}, {"drain": True}],
)
def test_only_exactly_the_expected_part_is_taken(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"lease": 7, "part": 3, "num_blocks": 2, "offset": 64, "piece_bytes": 1024}
    PartHeader(**fields, layout_digest=LAYOUT.digest()).require(7, 3, 2, 64, 1024, LAYOUT.digest())
    with pytest.raises(TransferError, match="expected"):
        PartHeader(**(fields | changes), layout_digest=LAYOUT.digest()).require(7, 3, 2, 64, 1024, LAYOUT.digest())
    with pytest.raises(LayoutMismatch):
        PartHeader(**fields, layout_digest=OTHER_LAYOUT.digest()).require(7, 3, 2, 64, 1024, LAYOUT.digest())


@given(
    num_layers=st.integers(1, 9),
    layer_bytes=st.integers(1, 5),
    part_blocks=st.integers(1, 4),
    first=st.integers(0, 6),
    num_blocks=st.integers(0, 12),
    grouped_from=st.integers(0, 20),
    num_groups=st.integers(1, 9),
)
def test_the_parts_of_a_plan_carry_every_byte_once_and_fit_a_slot(
    num_layers: int,
    layer_bytes: int,
    part_blocks: int,
    first: int,
    num_blocks: int,
    grouped_from: int,
    num_groups: int,
) -> None:
    layout = dataclasses.replace(LAYOUT, num_layers=num_layers, block_bytes=num_layers * layer_bytes)
    end = first + num_blocks
    carried = Counter[tuple[int, int]]()
    last_layer = 0
    for piece in plan_parts(layout, part_blocks, first, end, grouped_from, num_groups):
        assert 0 < piece.num_blocks * piece.num_bytes <= part_blocks * layout.block_bytes
        assert piece.offset + piece.num_bytes == piece.end_layer * layer_bytes
        last_byte = piece.offset + piece.num_bytes
        blocks = range(piece.first, piece.first + piece.num_blocks)
        carried.update((block, byte) for block in blocks for byte in range(piece.offset, last_byte))
        if piece.first >= grouped_from and num_groups > 1:
            assert piece.end_layer >= last_layer, "a later group goes before an earlier one"
            last_layer = piece.end_layer
        else:
            assert piece.num_bytes == layout.block_bytes
    assert carried == Counter((block, byte) for block in range(first, end) for byte in range(layout.block_bytes))


def test_no_part_has_more_pieces_than_a_slot_has_checksums_for() -> None:
    layout = dataclasses.replace(LAYOUT, num_layers=2, block_bytes=2)
    end = 2 * MAX_PIECES + 5
    whole = plan_parts(layout, end, 0, end)
    assert [piece.num_blocks for piece in whole] == [MAX_PIECES, MAX_PIECES, 5]
    grouped = plan_parts(layout, MAX_PIECES, 0, end, 0, 2)
    assert [piece.num_blocks for piece in grouped] == [MAX_PIECES, MAX_PIECES, 5] * 2
