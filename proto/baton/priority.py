"""A request's priority, as in vLLM: a lower value is served earlier.

Order is strict: in the queue of a prefill node, in a decode node's queues of reservations and prompts, and among
requests that were preempted. Among equals, the first to arrive is first; if blocks run out, the latest of those with
the highest value is preempted. Nothing ages, so a request can wait until its deadline while others come before it.
"""

from __future__ import annotations

from baton.errors import InvalidRequest

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


def check_priority(priority: int) -> int:
    """The priority, unchanged. Raises InvalidRequest for one that is out of range."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority must be in [-2^31, 2^31), not {priority}", "priority")
    return priority
