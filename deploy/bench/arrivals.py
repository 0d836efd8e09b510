"""When requests are sent: open loop, so a slow server does not slow down its clients."""

from __future__ import annotations

from random import Random
from typing import Literal

Arrival = Literal["poisson", "fixed", "burst"]


def arrival_times(kind: Arrival, count: int, per_s: float, burst_size: int, seed: int) -> list[float]:
    """Seconds from the start, ascending, the first at 0; `per_s` requests a second on average.

    poisson: exponential gaps, drawn with `seed`; fixed: equal gaps; burst: `burst_size` at once, then a gap that keeps
    the rate.
    """
    if kind == "fixed":
        return [index / per_s for index in range(count)]
    if kind == "burst":
        return [index // burst_size * burst_size / per_s for index in range(count)]
    random, now, times = Random(f"arrivals {seed}"), 0.0, list[float]()
    for _ in range(count):
        times.append(now)
        now += random.expovariate(per_s)
    return times
