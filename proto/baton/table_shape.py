"""The shape of block tables: which blocks a sequence has of how many tokens, if layers with a sliding window give back
what no token will read again.

A model's layers fall into groups (`baton.kv_groups`), and a block holds the KV of `block_size` tokens in the layers
of one group. A table is a flat list with a column for each `block_size` tokens, of one entry for each group:

    | column 0            | column 1            | ...
    | group 0 | group 1   | group 0 | group 1   |

With one group that is the list of a sequence's blocks. Entries behind the window of their group are the null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.layout import num_blocks_for

NO_WINDOW: tuple[int | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class TableShape:
    """`windows`: of each group, how many tokens attention sees, its own included; None: all before it."""

    block_size: int
    windows: tuple[int | None, ...] = NO_WINDOW

    @property
    def width(self) -> int:
        """Entries of a column."""
        return len(self.windows)

    @property
    def num_full(self) -> int:
        """Groups without a window."""
        return self.windows.count(None)

    @property
    def has_windows(self) -> bool:
        return self.num_full < len(self.windows)

    def num_columns(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.block_size)

    def first_column(self, group: int, num_computed: int) -> int:
        """The first column of which a token after the first `num_computed` reads the group's block."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed + 1 - window) // self.block_size

    def fallen_behind(self, before: int, num_computed: int) -> Iterator[int]:
        """The entries that were read after `before` tokens, and are not after `num_computed`."""
        for group, window in enumerate(self.windows):
            if window is not None:
                first, end = self.first_column(group, before), self.first_column(group, num_computed)
                yield from range(first * self.width + group, end * self.width + group, self.width)

    def num_held(self, num_tokens: int) -> int:
        """Blocks of a sequence of so many tokens, all computed."""
        columns = num_blocks_for(num_tokens, self.block_size)
        if self.windows == NO_WINDOW:
            return columns
        return sum(columns - min(columns, self.first_column(group, num_tokens)) for group in range(self.width))

    def most_held(self, num_columns: int, num_in_flight: int) -> int:
        """The most blocks that a sequence needs at a time while it gets so many columns, if the steps that are
        launched and have not retired compute at most `num_in_flight` of its tokens."""
        return sum(
            num_columns if window is None else min(num_columns, self.most_in_window(window, num_in_flight))
            for window in self.windows
        )

    def most_in_window(self, window: int, num_in_flight: int) -> int:
        """The most columns of a group with that window that are read or written at a time."""
        return self.num_columns(window - 1 + num_in_flight) + 1

    def lacking(self, num_columns: int, least_tokens: int, held: Sequence[int]) -> Sequence[int]:
        """The entries of so many columns that somebody lacks who is to go on after any number of tokens from
        `least_tokens` on, in the order in which they are computed. held: for each group, the columns below this one are
        there already, or not read."""
        if self.windows == NO_WINDOW:
            return range(min(held[0], num_columns), num_columns)
        first = [max(there, self.first_column(group, least_tokens)) for group, there in enumerate(held)]
        return [
            column * self.width + group
            for column in range(min(first), num_columns)
            for group in range(self.width)
            if column >= first[group]
        ]
