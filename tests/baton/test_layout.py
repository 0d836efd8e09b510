"""How two nodes compare their blocks, and how layers and tokens are divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import LayoutMismatch
from baton.layout import KvLayout, layer_groups_of, num_blocks_for

LAYOUT = KvLayout(4, 2, 32, 32, 16, "float32", 0, 2, 65536, "fingerprint")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KvLayout)])
def test_a_difference_in_any_field_is_named(field: str) -> None:
    mine = getattr(LAYOUT, field)
    change: dict[str, Any] = {field: mine + 1 if isinstance(mine, int) else "other"}
    other = dataclasses.replace(LAYOUT, **change)
    with pytest.raises(LayoutMismatch, match=f"^{field} {mine} != .* of the node$") as refused:
        LAYOUT.require_same(other, "the node")
    assert refused.value.field == field
    assert LAYOUT.digest() != other.digest()
    LAYOUT.require_same(dataclasses.replace(LAYOUT), "the node")


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
