"""The highest rate at which enough requests are within limits: goodput, as in DistServe (Zhong et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deploy.bench.load import Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds. A request is within them by its TTFT and by the mean of its ITL."""

    ttft: float
    itl: float

    def share(self, outcomes: Sequence[Outcome]) -> float:
        """Requests within both, of all that were sent: one that failed is not."""
        return sum(map(self._holds, outcomes)) / len(outcomes)

    def _holds(self, outcome: Outcome) -> bool:
        if outcome.error or outcome.ttft > self.ttft:
            return False
        gaps = outcome.gaps
        return not gaps or sum(gaps) / len(gaps) <= self.itl


async def highest_rate(attains: Callable[[float], Awaitable[bool]], low: float, high: float, steps: int) -> float:
    """The highest rate tried that attains the limits; 0 if `low` does not. Bisects on a logarithmic scale, since rates
    differ by factors."""
    if not await attains(low):
        return 0.0
    if await attains(high):
        return high
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if await attains(middle):
            low = middle
        else:
            high = middle
    return low
