"""Which running request moves from a decode node that is fuller than another one.

One at a time from or to each node, and then none for a while, so that the nodes' loads tell of it before the next is
chosen: the largest that does not make the other node the fuller one.
"""

from __future__ import annotations

from router.placement.pool import Pool
from router.placement.routed_node import Node
from router.requests.attempts import Attempts
from router.requests.migrations import Migrations, is_movable, may_move
from router.requests.request_state import Attempt, RequestState

PAUSE_S = 1.0


class Rebalancing:
    """`above`: by how much more of its KV pool a node may use than another one, 0 to 1; None: nothing moves for it."""

    def __init__(self, pool: Pool, attempts: Attempts, migrations: Migrations, above: float | None) -> None:
        self._pool = pool
        self._attempts = attempts
        self._migrations = migrations
        self._above = above
        self._not_before: dict[str, float] = {}  # by incarnation

    def forget(self, incarnation: str) -> None:
        self._not_before.pop(incarnation, None)

    def loaded(self, incarnation: str, now: float) -> None:
        """The node has told its load."""
        node = self._pool.get(incarnation)
        if self._above is None or node is None or self._rests(node, now):
            return
        targets = [other for other in self._pool.targets(node, now) if not self._rests(other, now)]
        target = min(targets, key=lambda other: other.in_use, default=None)
        if target is None or node.in_use - target.in_use <= self._above:
            return
        num_tokens = int((node.in_use - target.in_use) / 2 * min(node.capacity, target.capacity))
        if chosen := self._choose(node, target, num_tokens, now):
            self._not_before[incarnation] = self._not_before[target.info.incarnation] = now + PAUSE_S
            self._migrations.ask(*chosen, node, target)

    def _rests(self, node: Node, now: float) -> bool:
        return now < self._not_before.get(node.info.incarnation, 0.0)

    def _choose(self, node: Node, target: Node, num_tokens: int, now: float) -> tuple[RequestState, Attempt] | None:
        """The request on the node with the most tokens, up to so many, that may move to the target."""
        fitting = [
            (state, attempt)
            for state, attempt in self._attempts.generating_on(node.info.incarnation)
            if is_movable(attempt, now) and may_move(state, attempt, target) and _size(state, attempt) <= num_tokens
        ]
        return max(fitting, key=lambda found: _size(*found), default=None)


def _size(state: RequestState, attempt: Attempt) -> int:
    return len(state.request.prompt_tokens) + len(attempt.unfinished[0].tokens)
