"""Which blocks a table has, against what attention reads token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.table_shape import NO_WINDOW, TableShape

shapes = st.builds(
    TableShape, st.integers(1, 5), st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3).map(tuple)
)


def columns_read(shape: TableShape, group: int, num_computed: int, num_tokens: int) -> set[int]:
    """By the tokens from `num_computed` to `num_tokens`, each for itself; it writes before it reads."""
    window = shape.windows[group]
    read = set[int]()
    for position in range(num_computed, num_tokens + 1):
        first = 0 if window is None else max(0, position - window + 1)
        read |= {seen // shape.block_size for seen in range(first, position + 1)}
    return read


@given(shape=shapes, num_computed=st.integers(0, 40), more=st.integers(0, 20))
def test_what_is_before_the_first_column_is_never_read(shape: TableShape, num_computed: int, more: int) -> None:
    for group in range(shape.width):
        read = columns_read(shape, group, num_computed, num_computed + more)
        assert min(read) == shape.first_column(group, num_computed)


@given(shape=shapes, before=st.integers(0, 40), more=st.integers(0, 20))
def test_what_falls_behind_was_read_and_is_not_any_more(shape: TableShape, before: int, more: int) -> None:
    fallen = list(shape.fallen_behind(before, before + more))
    assert sorted(fallen) == sorted(
        column * shape.width + group
        for group in range(shape.width)
        for column in range(shape.first_column(group, before), shape.first_column(group, before + more))
    )


@given(shape=shapes, num_tokens=st.integers(1, 40), chunk=st.integers(1, 9), ahead=st.integers(0, 1))
def test_no_step_needs_more_than_the_most(shape: TableShape, num_tokens: int, chunk: int, ahead: int) -> None:
    """Whatever part of the tokens the launched steps compute, and the step that is launched behind them."""
    in_flight = (1 + ahead) * chunk
    most = shape.most_held(shape.num_columns(num_tokens), in_flight)
    for num_computed in range(num_tokens):
        end = min(num_tokens, num_computed + in_flight)
        held = sum(
            len(columns_read(shape, group, num_computed, end - 1))
            for group, window in enumerate(shape.windows)
            if window is not None
        )
        assert held + shape.num_full * shape.num_columns(num_tokens) <= most
    assert shape.num_held(num_tokens) <= most


@given(shape=shapes, num_tokens=st.integers(1, 40), spare=st.integers(0, 6), data=st.data())
def test_what_is_lacking_is_what_some_next_token_reads(
    shape: TableShape, num_tokens: int, spare: int, data: st.DataObject
) -> None:
    least, columns = max(1, num_tokens - spare), shape.num_columns(num_tokens)
    held = [data.draw(st.integers(0, columns)) for _ in shape.windows]
    lacking = list(shape.lacking(columns, least, held))
    assert lacking == sorted(lacking)
    needed = {
        column * shape.width + group
        for group in range(shape.width)
        for end in range(least, num_tokens + 1)
        for column in columns_read(shape, group, end, end)
        if held[group] <= column < columns
    }
    assert needed <= set(lacking)
    first = [shape.first_column(group, least) for group in range(shape.width)]
    assert all(entry // shape.width >= first[entry % shape.width] for entry in lacking)
    assert all(entry // shape.width >= held[entry % shape.width] for entry in lacking)


def test_one_group_without_a_window_is_a_list_of_blocks() -> None:
    shape = TableShape(4)
    assert shape.windows == NO_WINDOW
    assert (shape.width, shape.has_windows) == (1, False)
    assert shape.lacking(5, 18, (2,)) == range(2, 5)
    assert (shape.num_held(18), shape.most_held(5, 100)) == (5, 5)
    assert list(shape.fallen_behind(0, 100)) == []
