"""The most likely tokens in one place of an answer, with their logprobs."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import overload

MOST_PAIRS = 20
"""So many are a tuple of pairs, the fastest to make and to read. Of more, each pair would take a hundred bytes, and a
whole vocabulary 15 MB for each token."""

TopTokens = Sequence[tuple[int, float]]
"""Token ids and logprobs, best first."""


class PackedTop(TopTokens):
    """Many of them, 8 bytes each. ids: of "I". logprobs: of "f", as many."""

    __slots__ = ("ids", "logprobs")

    def __init__(self, ids: array.array[int], logprobs: array.array[float]) -> None:
        self.ids = ids
        self.logprobs = logprobs

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.ids, self.logprobs, strict=True)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, place: slice) -> TopTokens: ...

    def __getitem__(self, place: int | slice) -> tuple[int, float] | TopTokens:
        if isinstance(place, slice):
            return top_tokens(self.ids[place], self.logprobs[place])
        return self.ids[place], self.logprobs[place]

    def __eq__(self, other: object) -> bool:
        """As a tuple of the pairs would be, so that a message equals what was written of it."""
        return isinstance(other, PackedTop | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def top_tokens(ids: array.array[int], logprobs: array.array[float]) -> TopTokens:
    """They keep the arrays if there are many."""
    return tuple(zip(ids, logprobs, strict=True)) if len(ids) <= MOST_PAIRS else PackedTop(ids, logprobs)
