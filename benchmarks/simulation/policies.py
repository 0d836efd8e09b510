"""The placements that a simulation compares: the router's own, and others as yardsticks.

A yardstick is a `Pool` that chooses otherwise. It may look at `held`: how many leading blocks of the request's prompt
each node holds, as the router's prefix index knows it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from random import Random

from baton.messages import NodeRole
from router.core import RouterCore
from router.placement import Node, Placement, Pool

EPOCH = 1


class Yardstick(Pool):
    """No node of a fleet fails, so it need not look at what to avoid. `held` is set before each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Mapping[str, int] = {}
        self.num_tokens = 0

    def choose(self, avoid: set[str], now: float) -> Placement | None:
        prefills, decodes = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE)
        return Placement(self._prefill(prefills), self._decode(decodes))

    def _prefill(self, nodes: list[Node]) -> Node:
        raise NotImplementedError

    def _decode(self, nodes: list[Node]) -> Node:
        """The least busy one, as the router has it."""
        return min(nodes, key=lambda node: (node.busy, node.info.node_id))


class RoundRobin(Yardstick):
    """The next prefill node and the next decode node."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = itertools.count()

    def choose(self, avoid: set[str], now: float) -> Placement | None:
        prefills, decodes, turn = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE), next(self._turns)
        return Placement(prefills[turn % len(prefills)], decodes[turn % len(decodes)])


class AtRandom(Yardstick):
    """Any prefill node and any decode node."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)

    def _prefill(self, nodes: list[Node]) -> Node:
        return self._random.choice(nodes)

    _decode = _prefill


class LongestPrefix(Yardstick):
    """The prefill node that holds most of the prompt, however much waits there; of equals, the least busy."""

    def _prefill(self, nodes: list[Node]) -> Node:
        return min(nodes, key=lambda node: (-self.held.get(node.info.incarnation, 0), node.backlog, node.info.node_id))


class LeastUncached(Yardstick):
    """The prefill node with the fewest tokens to compute until the prompt is done, its own included, without those that
    are cached there."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: defaultdict[str, deque[int]] = defaultdict(deque)  # tokens to compute, by prompt

    def _prefill(self, nodes: list[Node]) -> Node:
        return min(nodes, key=lambda node: (self._uncached(node) + self._waiting(node), node.info.node_id))

    def _uncached(self, node: Node) -> int:
        return self.num_tokens - self.held.get(node.info.incarnation, 0) * node.info.layout.block_size

    def _waiting(self, node: Node) -> int:
        return sum(self._queues[node.info.incarnation])

    def place(self, placement: Placement, num_tokens: int) -> None:
        super().place(placement, num_tokens)
        self._queues[placement.prefill.info.incarnation].append(self._uncached(placement.prefill))

    def prefilled(self, incarnation: str, num_tokens: int) -> None:
        """Prompts are computed in the order in which they came."""
        super().prefilled(incarnation, num_tokens)
        self._queues[incarnation].popleft()


def _with(make_pool: Callable[[], Pool]) -> Callable[[], RouterCore]:
    def make() -> RouterCore:
        router = RouterCore(EPOCH)
        router.pool = router._attempts._pool = make_pool()
        return router

    return make


POLICIES: dict[str, Callable[[], RouterCore]] = {
    "router": lambda: RouterCore(EPOCH),
    "least-uncached": _with(LeastUncached),
    "longest-prefix": _with(LongestPrefix),
    "round-robin": _with(RoundRobin),
    "random": _with(AtRandom),
}
"""`router`: what the router does."""
