"""Which tokens would complete a bad word, given the output so far."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

ANY_TOKEN = -1
"""Stands for any preceding token."""

Forbidden = list[tuple[int, int]]
"""(token, previous token) pairs: the token is forbidden after the previous one, or after every token if that is
`ANY_TOKEN`."""


class BadWords:
    """The token sequences that one request's output must not contain.

    A step may be launched before the host knows the last token of the output. The host then knows after which last
    tokens a word would be complete, and the device compares. A few look-ups find all words, however many there are.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._after: dict[tuple[int, ...], Forbidden] = {}  # by all tokens of a word but the last
        self._around: dict[tuple[int, ...], Forbidden] = {}  # by all tokens of a word but the last two
        for word in dict.fromkeys(words):
            *before, last = word
            self._after.setdefault(tuple(before), []).append((last, ANY_TOKEN))
            if before:
                self._around.setdefault(tuple(before[:-1]), []).append((last, before[-1]))
        self._lengths_after = sorted({len(key) for key in self._after})
        self._lengths_around = sorted({len(key) for key in self._around})

    def forbidden(self, tokens: Seq[int], start: int, num_unknown: int) -> Forbidden:
        """The tokens that must not follow the output `tokens[start:]`. num_unknown: 1 if the output has one more token,
        which the host does not know yet."""
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
