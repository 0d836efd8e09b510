"""Text that arrives in pieces, read by generators: each `yield` waits for more.

A function of type `Reading[T]` is used as `value = yield from ...`. It decides nothing before it has seen all
characters that the decision depends on, so results are the same however the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_BLANKS = re.compile(r"[ \t\r\n]*")


class Source:
    """`taken` is the text that was read since `begin`, for content if it turns out to be no call."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []
        self._taken_from: int | None = None

    def add(self, text: str) -> None:
        if self._taken_from is not None:
            self._taken.append(self._text[self._taken_from : self._at])
            self._taken_from = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def begin(self) -> None:
        self._taken.clear()
        self._taken_from = self._at

    def forget(self) -> None:
        """What is read from now on will not be asked for."""
        self._taken.clear()
        self._taken_from = None

    def taken(self) -> str:
        if self._taken_from is None:
            return ""
        return "".join(self._taken) + self._text[self._taken_from : self._at]

    def peek(self) -> Reading[str]:
        """The next character, not read; none at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def literal(self, expected: str) -> Reading[bool]:
        """Read `expected`, or nothing."""
        while True:
            if self._text.startswith(expected, self._at):
                self._at += len(expected)
                return True
            if self._ended or not expected.startswith(self._text[self._at : self._at + len(expected)]):
                return False
            yield

    def run(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[None]:
        """Read what `pattern` matches: any number of characters, each judged by itself."""
        while True:
            match = pattern.match(self._text, self._at)
            if match and match.end() > self._at:
                emit(match.group())
                self._at = match.end()
            if self._ended or self._at < len(self._text):
                return
            yield

    def text_of(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """As `run`, as one text. Stops soon after `most` characters, which no valid text has."""
        pieces: list[str] = []
        num_chars = 0
        while num_chars <= most and (char := (yield from self.peek())) and pattern.match(char):
            pieces.append(char)
            num_chars += 1
            self._at += 1
        return "".join(pieces)

    def ahead(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The text that comes next and that `pattern` matches, not read. It matches any text's beginning, so that its
        match is the longest once something else follows."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match
            if self._ended or match.end() < len(self._text):
                return match.group()
            yield

    def blanks(self) -> Reading[str]:
        pieces: list[str] = []
        yield from self.run(_BLANKS, pieces.append)
        return "".join(pieces)

    def until(self, marks: Sequence[str], pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[str | None]:
        """Read up to the first of `marks`, which is returned and not read; None at the end. `pattern` finds any."""
        while True:
            match = pattern.search(self._text, self._at)
            end = (
                match.start()
                if match
                else len(self._text) - (0 if self._ended else num_held(self._text[self._at :], marks))
            )
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if match:
                return match.group()
            if self._ended:
                return None
            yield


def num_held(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a mark."""
    longest = min(max(map(len, marks)) - 1, len(text))
    for count in range(longest, 0, -1):
        end = text[-count:]
        if any(mark.startswith(end) for mark in marks):
            return count
    return 0


def any_of(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
