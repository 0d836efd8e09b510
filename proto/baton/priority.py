"""A request's priority, as in vLLM: a lower value is served earlier.

It counts as waiting: one unit is worth `AGING_S` seconds. A request is due at its arrival + priority x AGING_S, and the
one that is due first is served first: in the router's waiting room, in the queue of a prefill node, in a decode node's
queues of reservations and prompts, and among requests that were preempted. If blocks run out, the one due last is
preempted. Equal priorities are therefore first come, first served, and none starves: of two that are p units apart,
the one with the higher value waits only for those of the other that arrive up to p x AGING_S seconds after it.
"""

from __future__ import annotations

from baton.errors import InvalidRequest

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1

AGING_S = 10.0
"""The order of two requests never changes while they wait, since both age alike."""


def due_s(priority: int, arrived_s: float) -> float:
    """Where a request stands in a queue, in seconds of the clock that `arrived_s` is of: lower values come first."""
    return arrived_s + AGING_S * priority


def check_priority(priority: int) -> int:
    """The priority, unchanged. Raises InvalidRequest for one that is out of range."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority must be in [-2^31, 2^31), not {priority}", "priority")
    return priority
