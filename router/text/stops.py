"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Scan(NamedTuple):
    """`text` may go out now. `stop`: the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """All stop strings of a request as one automaton (Aho and Corasick, 1975): the cost per character of text does not
    depend on their number or length. Immutable, shared by the request's samples.

    A state stands for the longest end of the text with which a stop string begins; 0 for none. `found[state]` is the
    longest stop string that is complete there; `held[state]` is how many characters could still become a match.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.found: list[str | None] = [None]
        self.held = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self.edges) > 1

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self.edges[state]:
                self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.fallback.append(0)
                self.found.append(None)
                self.held.append(depth)
            state = self.edges[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        """Goes breadth first, so that the shorter end to which a state falls back is complete before it."""
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, child in self.edges[state].items():
                back = self.fallback[child] = self.next(self.fallback[state], char) if state else 0
                self.found[child] = self.found[child] or self.found[back]
                if not self.edges[child]:
                    self.held[child] = self.held[back]  # complete, so no longer match can come
                waiting.append(child)

    def next(self, state: int, char: str) -> int:
        while state and char not in self.edges[state]:
            state = self.fallback[state]
        return self.edges[state].get(char, 0)


NO_STOPS = StopStrings(())


class StopScanner:
    """Finds the first stop string of one sample, however the text is cut.

    The first complete match wins; if several are complete with the same character, the longest one. Holds back only
    text that could still become a match. `include` keeps the stop string in the text.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def add(self, piece: str, may_stop: bool = True) -> Scan:
        """Take the next piece. With `may_stop` False (below min_tokens) no match may be complete within it."""
        if not self._stops:
            return Scan(piece)
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            self._state = self._stops.next(self._state, char)
            stop = self._stops.found[self._state]
            if stop and may_stop:
                self.flush()
                return Scan(text[: end if self._include else end - len(stop)], stop)
        keep = len(text) - self._stops.held[self._state]
        self._held = text[keep:]
        return Scan(text[:keep])

    def flush(self) -> str:
        """The text that was held back, after an end without a match."""
        text, self._held, self._state = self._held, "", 0
        return text
