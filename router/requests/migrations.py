"""Running requests that move from one decode node to another, with their KV: all of a node that is to leave.

    (generates on a node) --Migrate--> asked --HandedOff, or the target's first message--> (handed over)
                                         |
                                         `-- Stayed: it goes on where it is, and is asked again later

The node that has the request decides when, and until it has handed it over everything it says counts as before. From
then on the attempt is one that this node has computed the prompt of, and the rules of `updates` for a handoff hold:
tokens of the target that overtake this node's wait for them.
"""

from __future__ import annotations

import logging
from collections import Counter

from baton.messages import DecodeTarget, Migrate, Stayed
from router.placement.pool import Pool
from router.placement.routed_node import Node
from router.requests.actions import Outbox
from router.requests.attempts import Attempts
from router.requests.request_state import Attempt, AttemptState, RequestState

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""How long an answer that a request stays holds: then its node, or the target, may have room."""


class Migrations:
    """`num_by_outcome`: `moved`; `stayed`, for each move that came to nothing; `lost`, if the attempt failed in it."""

    def __init__(self, pool: Pool, attempts: Attempts, outbox: Outbox) -> None:
        self._pool = pool
        self._attempts = attempts
        self._outbox = outbox
        self.num_by_outcome: Counter[str] = Counter({"moved": 0, "stayed": 0, "lost": 0})

    def empty(self, incarnation: str, now: float) -> None:
        """Have all requests that generate on the node move to others, as far as they can now."""
        node = self._pool.get(incarnation)
        if node is None or not (targets := self._pool.targets(node, now)):
            return
        for state, attempt in self._attempts.generating_on(incarnation):
            if is_movable(attempt, now) and (fitting := [n for n in targets if may_move(state, attempt, n)]):
                self.ask(state, attempt, node, min(fitting, key=lambda n: n.seats_taken))

    def ask(self, state: RequestState, attempt: Attempt, node: Node, target: Node) -> None:
        """Have the request move from the node, on which it generates, to the target."""
        attempt.num_moves += 1
        attempt.target = target.info.incarnation
        self._pool.will_decode(attempt.target, attempt.num_tokens, attempt.num_answers)
        place = DecodeTarget(target.info.address, target.info.incarnation)
        self._outbox.to_node(node.info.incarnation, Migrate(attempt.id, attempt.num_moves, place))

    def stayed(self, state: RequestState, attempt: Attempt, stayed: Stayed, now: float) -> None:
        if attempt.target is None or stayed.move != attempt.num_moves:
            return
        log.info("stays reason=%s", stayed.error.message, extra={"request_id": state.request.request_id})
        self.num_by_outcome["stayed"] += 1
        self._attempts.forget_target(state, attempt)
        attempt.ask_at = now + ASK_AGAIN_S

    def node_lost(self, incarnation: str) -> None:
        """What was to move from it is lost. Of what was to move to it, its node will say whether the request stays."""
        self.num_by_outcome["lost"] += sum(a.target is not None for _, a in self._attempts.generating_on(incarnation))
        for _, attempt in self._attempts.moving_to(incarnation):
            attempt.target_lost = True

    def handed_over(self, state: RequestState, attempt: Attempt) -> None:
        """The target has the request."""
        self.num_by_outcome["moved"] += 1
        state.timings.num_moves += 1
        self._attempts.move(state, attempt)


def may_move(state: RequestState, attempt: Attempt, target: Node) -> bool:
    """Whether the attempt may go to that node: it has not been there, and none of the request has failed there."""
    return attempt.may_go_to(target.info.incarnation) and target.info.incarnation not in state.avoid


def is_movable(attempt: Attempt, now: float) -> bool:
    """Whether the attempt has one answer that is generated, by a node that has got all of it, and neither moves yet nor
    has said lately that it stays."""
    if now < attempt.ask_at:
        return False
    is_there = attempt.decode is None or attempt.handed_off
    is_generated = attempt.state is AttemptState.DECODING and len(attempt.unfinished) == 1 and not attempt.end_waits
    return is_there and is_generated and attempt.target is None and not attempt.unfinished[0].early
