"""Tracks pairs of nodes whose handoffs fail again and again; they are avoided for a while."""

from __future__ import annotations

from dataclasses import dataclass

MAX_FAILURES = 3
"""In a row, after which a pair is out. A single failure may be the death of a node that the router has yet to
notice."""
FIRST_OUT_S = 5.0
LAST_OUT_S = 60.0

Pair = tuple[str, str]
"""The incarnations of a prefill node and a decode node."""


@dataclass(slots=True)
class _Fault:
    num_failures: int = 0
    reason: str = ""
    out_s: float = 0.0  # how long the pair is out this time; 0: it never was
    until: float = 0.0


class PairFaults:
    """A pair that failed `MAX_FAILURES` handoffs in a row is out for `FIRST_OUT_S`. Each time its next handoff fails
    too, it is out for twice as long, up to `LAST_OUT_S`. One success clears it."""

    def __init__(self) -> None:
        self._faults: dict[Pair, _Fault] = {}

    def failed(self, pair: Pair, reason: str, now: float) -> None:
        """A handoff between the two has failed, but not because one of them is lost."""
        fault = self._faults.setdefault(pair, _Fault())
        fault.num_failures += 1
        fault.reason = reason
        if fault.num_failures >= MAX_FAILURES and fault.until <= now:
            fault.out_s = min(2 * fault.out_s, LAST_OUT_S) or FIRST_OUT_S
            fault.until = now + fault.out_s

    def worked(self, pair: Pair) -> None:
        self._faults.pop(pair, None)

    def forget(self, incarnation: str) -> None:
        """The node is gone; if it comes back, it has another incarnation."""
        for pair in [pair for pair in self._faults if incarnation in pair]:
            del self._faults[pair]

    def is_out(self, pair: Pair, now: float) -> bool:
        fault = self._faults.get(pair)
        return fault is not None and now < fault.until

    def why_out(self, pair: Pair, now: float) -> str | None:
        """Why the pair is out, for people. None: it is not out."""
        return self._faults[pair].reason if self.is_out(pair, now) else None
