"""Parts on their way to decode nodes, and which of these nodes have not taken one for too long.

Heartbeats do not show this: they travel on the control stream, and KV perhaps on another network. TCP itself gives up
only after a quarter of an hour. Until then the parts would keep their slots, which parts for other decode nodes need
too.
"""

from __future__ import annotations

from collections import Counter

from baton.deadlines import Deadlines

STUCK_S = 30.0
"""How long a decode node may go without taking a part although some are on their way to it. NCCL may take this long to
join a group for the first one."""


class Flights:
    """Each part begins and ends once, even if its stream goes down."""

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
        """The decode nodes that have taken no part for too long, each once."""
        return self._stuck_at.due(now)
