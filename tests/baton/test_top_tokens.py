"""Likely tokens with their logprobs: few are a tuple, many are packed, and both are read alike."""

from __future__ import annotations

import array

import pytest

from baton.top_tokens import MOST_PAIRS, PackedTop, top_tokens


@pytest.mark.parametrize("count", [0, 1, MOST_PAIRS, MOST_PAIRS + 1, 300])
def test_they_are_read_as_a_tuple_is(count: int) -> None:
    pairs = tuple((1000 - token, -token / 2) for token in range(count))
    top = top_tokens(array.array("I", [token for token, _ in pairs]), array.array("f", [value for _, value in pairs]))
    assert isinstance(top, PackedTop) is (count > MOST_PAIRS)
    assert (len(top), bool(top), tuple(top)) == (count, count > 0, pairs)
    assert top == pairs
    assert pairs == top
    assert hash(top) == hash(pairs)
    assert top != (*pairs, (1, -1.0))
    for place in (slice(5), slice(1, None), slice(-30, -1), slice(0, 0)):
        assert tuple(top[place]) == pairs[place]
    if count:
        assert (top[0], top[-1]) == (pairs[0], pairs[-1])
