"""How many attempts beyond a request's first the router may make, so that failures do not multiply its load."""

from __future__ import annotations

import math

SHARE = 0.2
"""Of the requests of the last seconds: so many further attempts are allowed."""
MIN_PER_S = 10.0
"""Allowed in any case, for a router with few requests."""
MEMORY_S = 10.0
"""How long a request's share can be used, and how fast a budget that was used up recovers."""
_FLOOR = MIN_PER_S * MEMORY_S


class RetryBudget:
    """Each request puts `SHARE` of an attempt in, each further attempt takes one out. What is there drifts towards
    `MIN_PER_S * MEMORY_S`, from below and from above. As Finagle's RetryBudget (20% on top of 10 per second, which
    expire after 10 s), with a decay instead of a list of expiries.

    An attempt that follows the loss of a node, or its refusal as it stops, takes nothing: each request makes at most
    two of the former (`router.requests.recovery.MAX_LOST_NODES`), and all streams of a node go on elsewhere when it
    dies.
    """

    def __init__(self) -> None:
        self._balance = _FLOOR
        self._at: float | None = None

    def request(self, now: float) -> None:
        """A request came in."""
        self._decay(now)
        self._balance += SHARE

    def take(self, now: float, num_attempts: int = 1) -> bool:
        """Take so many further attempts at one request. False: the budget is used up. It may be overdrawn: many answers
        to one prompt are tried again together, or not at all."""
        self._decay(now)
        if self._balance < 1:
            return False
        self._balance -= num_attempts
        return True

    def _decay(self, now: float) -> None:
        passed_s = max(0.0, now - self._at) if self._at is not None else 0.0
        self._at = now
        self._balance = _FLOOR + (self._balance - _FLOOR) * math.exp(-passed_s / MEMORY_S)
