"""Which tokens would complete a bad word, given the output so far."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

ANY_TOKEN = -1
"""Stands for the token before, where it does not matter."""

Forbidden = list[tuple[int, int]]
"""(token, the token before): the first is forbidden after the second, or after any with `ANY_TOKEN`."""


class BadWords:
    """Of one request: sequences of tokens which its output must not contain.

    A step may be launched before the host knows the last token of the output. Then it is known for which last tokens a
    word would be completed, and the device compares. All words are found by a few look-ups, however many there are.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._after: dict[tuple[int, ...], Forbidden] = {}  # by all tokens of a word but its last
        self._around: dict[tuple[int, ...], Forbidden] = {}  # by all but its last two
        for word in dict.fromkeys(words):
            *before, last = word
            self._after.setdefault(tuple(before), []).append((last, ANY_TOKEN))
            if before:
                self._around.setdefault(tuple(before[:-1]), []).append((last, before[-1]))
        self._lengths_after = sorted({len(key) for key in self._after})
        self._lengths_around = sorted({len(key) for key in self._around})

    def forbidden(self, tokens: Seq[int], start: int, num_unknown: int) -> Forbidden:
        """What must not follow the output `tokens[start:]`, of which one more token, the last, may be unknown here."""
        assert num_unknown in (0, 1)
        if not num_unknown:
            return self._found(self._after, self._lengths_after, tokens, start)
        single = self._after.get((), [])
        return single + self._found(self._around, self._lengths_around, tokens, start)

    @staticmethod
    def _found(words: dict[tuple[int, ...], Forbidden], lengths: list[int], tokens: Seq[int], start: int) -> Forbidden:
        found: Forbidden = []
        for length in lengths:
            first = len(tokens) - length
            if first < start:
                break
            found += words.get(tuple(tokens[first:]), [])
        return found
