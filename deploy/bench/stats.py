"""Summary statistics of measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as in numpy; NaN for an empty list."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90 and p99."""
    mean = {"mean": statistics.fmean(values) if values else math.nan}
    return {**mean, **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES}}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median for any distribution, from the order statistics of the sign test (see
    any text on nonparametric methods). The whole range for fewer than six values."""
    ordered = sorted(values)
    n = len(ordered)
    tail, below = 0.0, 0  # `below`: largest k with P(Binomial(n, 1/2) < k) <= 0.025
    while below < n // 2:
        tail += math.comb(n, below) / 2**n
        if tail > 0.025:
            break
        below += 1
    low = max(below - 1, 0)
    return ordered[low], ordered[n - 1 - low]


def table(rows: Mapping[str, Mapping[str, float]], title: str) -> str:
    """Rows by name, with the columns of the first row; numbers have two decimals, one from 100 on."""
    columns = list(next(iter(rows.values())))
    width = max(len(title), *map(len, rows))
    lines = [" ".join([f"{title:{width}}", *(f"{column:>9}" for column in columns)])]
    for name, row in rows.items():
        lines.append(" ".join([f"{name:{width}}", *(_number(row[column]) for column in columns)]))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:9.2f}" if abs(value) < 100 else f"{value:9.1f}"
