"""Shows text as it arrives, in whole words and within the width of the terminal."""

from __future__ import annotations

from rich.console import Console


class Typewriter:
    """Writes words after an indent. A word is written once the next one begins, so that it is never broken."""

    def __init__(self, console: Console, indent: int) -> None:
        self._console = console
        self._indent = " " * indent
        self._word = ""
        self._column = 0

    def write(self, text: str) -> None:
        *words, self._word = (self._word + text).split(" ")
        for word in words:
            self._put(word)

    def end(self) -> None:
        self._put(self._word)
        self._console.print()
        self._word, self._column = "", 0

    def _put(self, word: str) -> None:
        if self._column + 1 + len(word) > self._console.width:
            self._console.print()
            self._column = 0
        space = " " if self._column else self._indent
        self._console.print(space + word, end="", markup=False, highlight=False, soft_wrap=True)
        self._column += len(space + word)
