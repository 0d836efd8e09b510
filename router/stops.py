"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` may go out now. `stop`: the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopScanner:
    """Finds the first stop string of one sample, however the text is cut.

    The match that is complete first wins; of several that are complete with the same character, the longest. Holds back
    only text that could still become a match. `include` keeps the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def add(self, piece: str, may_stop: bool = True) -> Scan:
        """Take the next piece. With `may_stop` False (below min_tokens) no match may be complete within it."""
        if not self._stops:
            return Scan(piece)
        text = self._held + piece
        if may_stop and (match := self._first_match(text)):
            end, stop = match
            self._held = ""
            return Scan(text[: end if self._include else end - len(stop)], stop)
        keep = self._possible_start(text)
        self._held = text[keep:]
        return Scan(text[:keep])

    def flush(self) -> str:
        """What was held back: the text ended without a match."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and string of the match that wins among those that end in the new piece."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), stop))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop

    def _possible_start(self, text: str) -> int:
        """Where the longest tail begins that could be the beginning of a match."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > len(tail)):
                return start
        return len(text)
