"""To how many tokens a step is padded: the smallest graph with room for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.step_padding import UNPADDED, StepPadding

PADDING = StepPadding(((0, (64, 512)), (32, (96, 480)), (128, (128, 384))))


def test_the_smallest_graph_with_room_is_taken() -> None:
    assert PADDING.fitting(0, 65) == (32, 96)
    assert PADDING.fitting(0, 481) == (0, 512)
    assert PADDING.fitting(32, 200) == (32, 480)
    assert PADDING.fitting(33, 200) == (128, 384)
    assert PADDING.fitting(129, 1) is PADDING.fitting(1, 481) is None


def test_empty_places_of_decodes_count_as_tokens_of_prompts() -> None:
    assert PADDING.padded(24, 96) == 104
    assert PADDING.padded(24, 0) == 0
    assert PADDING.padded(200, 50) == 50
    assert UNPADDED.padded(3, 7) == 7


def test_the_largest_graph_may_be_one_for_more_decodes() -> None:
    assert PADDING.largest(0) == 512
    assert StepPadding(((0, (64,)), (32, (96, 480)))).largest(0) == 480
    assert PADDING.largest(33) == 384
    assert PADDING.largest(129) == UNPADDED.largest(0) == 0


def test_graphs_take_so_many_prompts_of_such_a_length() -> None:
    padding = StepPadding(PADDING.ladders, most_prompts=8, most_context=1000)
    assert padding.takes(8, 1000)
    assert not padding.takes(9, 1000)
    assert not padding.takes(8, 1001)
    assert PADDING.takes(100, 10**6)


def test_chunks_are_chosen_from_the_sizes_that_waste_least() -> None:
    assert PADDING.sizes(32) == (96, 480)
    assert PADDING.sizes(33) == (128, 384)
    assert PADDING.sizes(200) == UNPADDED.sizes(1) == ()


@given(st.integers(0, 140), st.integers(1, 600), st.integers(1, 600))
def test_more_tokens_are_never_padded_to_fewer(decodes: int, one: int, other: int) -> None:
    one, other = sorted((one, other))
    assert one <= PADDING.padded(decodes, one)
    if PADDING.fitting(decodes, other):
        assert PADDING.padded(decodes, one) <= PADDING.padded(decodes, other)
