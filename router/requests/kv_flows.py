"""How many bytes of KV went from which node to which, since the router's start."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_PAIRS = 4096
"""Pairs that are remembered. Nodes that start again are new ones: the pairs that were used longest ago go first."""


@dataclass(frozen=True, slots=True)
class KvFlow:
    """`source`, `target`: incarnations. `num_bytes`, `num_handoffs`: totals, of what the target has taken in."""

    source: str
    target: str
    num_bytes: int
    num_handoffs: int


class KvFlows:
    """Totals by pair of nodes."""

    def __init__(self, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._totals: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def add(self, source: str, target: str, num_bytes: int) -> None:
        """A handoff is complete."""
        pair = source, target
        total_bytes, num_handoffs = self._totals.pop(pair, (0, 0))
        self._totals[pair] = total_bytes + num_bytes, num_handoffs + 1
        if len(self._totals) > self._max_pairs:
            self._totals.popitem(last=False)

    def totals(self) -> list[KvFlow]:
        return [KvFlow(*pair, *total) for pair, total in self._totals.items()]
