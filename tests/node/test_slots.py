"""Staging slots as the link wants them, or as told."""

from typing import Any

import pytest

from node.settings import NodeSettings
from node.slots import MIN_SLOTS, PART_OVERHEAD_S, ROUND_TRIP_S, SlotSizes, slot_sizes

BLOCK_8B = 2 << 20


def sizes(block_bytes, on_gpu, **fields) -> SlotSizes:
    return slot_sizes(NodeSettings(model="none", **fields), block_bytes, on_gpu)


def test_of_an_8b_model_on_a_gpu():
    assert sizes(BLOCK_8B, True) == SlotSizes(num_slots=10, part_blocks=49)


@pytest.mark.parametrize("block_bytes", [1 << 10, 64 << 10, BLOCK_8B, 64 << 20])
@pytest.mark.parametrize("gb_s", [0.1, 12.5, 340.0])
def test_slots_together_hold_a_round_trip_and_a_part_outweighs_what_it_costs(block_bytes, gb_s):
    found = sizes(block_bytes, True, kv_link_bandwidth=gb_s)
    part_bytes = found.part_blocks * block_bytes
    assert found.num_slots >= MIN_SLOTS
    assert found.num_slots * part_bytes >= gb_s * 1e9 * ROUND_TRIP_S
    assert found.part_blocks == 1 or abs(part_bytes - gb_s * 1e9 * PART_OVERHEAD_S) <= block_bytes / 2


def test_as_told():
    assert sizes(BLOCK_8B, True, kv_slots=3, kv_slot_blocks=7) == SlotSizes(3, 7)
    assert sizes(BLOCK_8B, False, kv_slot_blocks=7).num_slots == MIN_SLOTS


def test_no_slots_are_large_enough_for_an_infinite_link():
    with pytest.raises(ValueError, match="kv_link_bandwidth"):
        sizes(BLOCK_8B, True, kv_link_bandwidth=float("inf"))


@pytest.mark.parametrize("field", ["kv_slots", "num_gpu_blocks_override", "block_size", "max_num_seqs", "seed"])
def test_sizes_that_no_machine_has_are_refused_by_name(field):
    changes: dict[str, Any] = {field: 10**20}
    with pytest.raises(ValueError, match=f"{field}\n.*less than"):
        NodeSettings(model="none", **changes)
