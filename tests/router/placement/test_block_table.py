"""The table behind the prefix index: runs of neighbours give the same answer as one lookup for each block."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from router.placement.block_table import BlockTable, keys_of


def block(number: int) -> bytes:
    return number.to_bytes(32, "little")


def expand(runs: object) -> list[int]:
    return [mask for number, mask in runs for _ in range(number)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(20))
def test_leading_masks_are_those_of_each_block_alone(seed):
    """Prompts come whole, one after another or side by side; blocks of them go, and others take their places."""
    draw, table, held = Random(seed), BlockTable(), dict[int, int]()
    prompts = [list(range(1000 * i, 1000 * i + draw.randint(1, 300))) for i in range(1, 6)]
    side_by_side = [number for column in itertools.zip_longest(*prompts[3:]) for number in column if number is not None]
    for numbers in (*prompts[:3], side_by_side):
        for number in numbers:
            (key,) = keys_of([block(number)])
            held[number] = draw.choice([1, 3]) if draw.random() < 0.02 else 2
            table.set_mask(table.add(key), held[number])
        for number in draw.sample(sorted(held), min(len(held), 3)):
            place = table.find(keys_of([block(number)])[0])
            assert place is not None
            table.set_mask(place, 0)
            del held[number]
    assert len(table) == len(held)
    for prompt in prompts:
        for cut in {0, 1, 2, len(prompt), draw.randint(0, len(prompt))}:
            wanted = prompt[:cut] + draw.choice(prompts)[draw.randint(0, 4) :]
            expected = [held[number] for number in itertools.takewhile(held.__contains__, wanted)]
            assert expand(table.leading([block(number) for number in wanted])) == expected


def test_a_place_that_was_freed_last_is_used_first():
    """So the blocks of a prompt that were evicted from its end on leave room for the next prompt in its order."""
    table = BlockTable()
    places = [table.add(key) for key in keys_of([block(number) for number in range(1, 6)])]
    for place in places:
        table.set_mask(place, 1)
    for place in reversed(places):
        table.set_mask(place, 0)
    assert [table.add(key) for key in keys_of([block(number) for number in range(11, 16)])] == places
