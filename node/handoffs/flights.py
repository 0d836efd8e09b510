"""Parts on their way to decode nodes, and which of these nodes have taken none for too long.

Heartbeats do not tell: they travel on the control stream, KV perhaps on a network of its own. TCP itself gives up after
a quarter of an hour. Until then the parts would keep their slots, which those to other decode nodes need, too.
"""

from __future__ import annotations

from collections import Counter

from baton.deadlines import Deadlines

STUCK_S = 30.0
"""How long a decode node may take no part although some are on their way to it: as long as NCCL may take to join a
group at the first one."""


class Flights:
    """Each part begins and ends once, also one of a stream that is down."""

    def __init__(self) -> None:
        self._num = Counter[str]()  # by decode node
        self._stuck_at = Deadlines[str]()

    def next_deadline(self) -> float | None:
        return self._stuck_at.next()

    def begun(self, peer: str, now: float) -> None:
        """A part was handed to the transport."""
        self._num[peer] += 1
        if peer not in self._stuck_at:
            self._stuck_at.set(peer, now + STUCK_S)

    def ended(self, peer: str, now: float) -> None:
        """A part has left, or failed."""
        self._num[peer] -= 1
        if self._num[peer]:
            self._stuck_at.set(peer, now + STUCK_S)
        else:
            del self._num[peer]
            self._stuck_at.discard(peer)

    def take_stuck(self, now: float) -> list[str]:
        """The decode nodes that have taken none for too long, each once."""
        return self._stuck_at.due(now)
