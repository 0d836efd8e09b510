"""The router cores that a simulation can compare, by the name of their placement policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from baton.messages import NodeRole
from benchmarks.simulation.fleet import EPOCH
from router.core import RouterCore
from router.placement import Placement, Pool


class RoundRobinPool(Pool):
    """Each request goes to the next prefill node and the next decode node."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = itertools.count()

    def choose(self, avoid: set[str], now: float) -> Placement | None:
        prefills, decodes, turn = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE), next(self._turns)
        return Placement(prefills[turn % len(prefills)], decodes[turn % len(decodes)])


class RandomPool(Pool):
    """Each request goes to any prefill node and any decode node."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)

    def choose(self, avoid: set[str], now: float) -> Placement | None:
        pick = self._random.choice
        return Placement(pick(self.role(NodeRole.PREFILL)), pick(self.role(NodeRole.DECODE)))


def _with(pool: Callable[[], Pool]) -> Callable[[], RouterCore]:
    """A router whose pool is another. No node of a fleet fails, so the pool need not look at what to avoid."""

    def make() -> RouterCore:
        router = RouterCore(EPOCH)
        router.pool = router._attempts._pool = pool()
        return router

    return make


POLICIES: dict[str, Callable[[], RouterCore]] = {
    "least-loaded": lambda: RouterCore(EPOCH),
    "round-robin": _with(RoundRobinPool),
    "random": _with(RandomPool),
}
