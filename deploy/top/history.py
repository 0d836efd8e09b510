"""Rates and percentiles of the last seconds, from differences between snapshots."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from deploy.top.source import Snapshot

WINDOW_S = 15.0
"""Of percentiles and rates."""
HISTOGRAMS = ("first_token_s", "inter_token_s")


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]`: observations up to `bounds[i]` and above the bound before; the last: above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def quantile(self, share: float) -> float:
        """Linear within a bucket, as Prometheus has it; NaN without observations."""
        rank, low = share * sum(self.counts), 0.0
        if not rank:
            return math.nan
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and rank <= count:
                return low + (bound - low) * rank / count
            rank, low = rank - count, bound
        return low


@dataclass(frozen=True, slots=True)
class _Step:
    at: float
    seconds: float
    totals: dict[str, int]
    kv_bytes: dict[tuple[str, str], int]
    node_tokens: dict[str, int]
    histograms: dict[str, Histogram]


class History:
    """`add` each snapshot; then ask."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._last: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """A router that began anew, or a worker that did not answer, has no differences to what was before."""
        before, self._last = self._last, snapshot
        if before is None or snapshot["at"] <= before["at"] or _is_anew(before, snapshot):
            return
        self._steps.append(_step(before, snapshot))
        while self._steps[0].at <= snapshot["at"] - WINDOW_S:
            self._steps.popleft()

    def rate(self, name: str) -> float:
        """A second, of one of the work's totals."""
        seconds = sum(step.seconds for step in self._steps)
        return sum(step.totals[name] for step in self._steps) / seconds if seconds else 0.0

    def kv_rates(self) -> dict[str, float]:
        """Bytes a second by the incarnation of a node, in and out."""
        seconds = sum(step.seconds for step in self._steps)
        rates: Counter[str] = Counter()
        for step in self._steps:
            for pair, num_bytes in step.kv_bytes.items():
                for incarnation in pair:
                    rates[incarnation] += num_bytes
        return {incarnation: num_bytes / seconds for incarnation, num_bytes in rates.items()}

    def token_rates(self) -> dict[str, float]:
        """Tokens a second by the incarnation of a node: of prompts, and generated."""
        seconds = sum(step.seconds for step in self._steps)
        tokens: Counter[str] = Counter()
        for step in self._steps:
            tokens.update(step.node_tokens)
        return {incarnation: number / seconds for incarnation, number in tokens.items()}

    def quantile(self, name: str, share: float) -> float:
        """Of one of HISTOGRAMS; NaN if nothing was observed."""
        return _sum(step.histograms[name] for step in self._steps).quantile(share)


_TOTALS = ("num_generation_tokens", "num_prompt_tokens")


def _is_anew(before: Snapshot, now: Snapshot) -> bool:
    """Of several workers, one may have begun again while the others made the sums grow: its share of some bucket is
    missing."""
    old, new = before["work"], now["work"]
    return (
        before["num_workers_answered"] != now["num_workers_answered"]
        or any(new[name] < old[name] for name in _TOTALS)
        or any(b < a for name in HISTOGRAMS for a, b in zip(old[name]["counts"], new[name]["counts"], strict=False))
    )


def _step(before: Snapshot, now: Snapshot) -> _Step:
    old, new = before["work"], now["work"]
    moved = {(flow["source"], flow["target"]): flow["num_bytes"] for flow in new["flows"]}
    for flow in old["flows"]:
        pair = flow["source"], flow["target"]
        if pair in moved:
            moved[pair] -= flow["num_bytes"]
    return _Step(
        now["at"],
        now["at"] - before["at"],
        {name: new[name] - old[name] for name in _TOTALS},
        moved,
        _grown(old["num_tokens_by_node"], new["num_tokens_by_node"]),
        {name: _minus(new[name], old[name]) for name in HISTOGRAMS},
    )


def _grown(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    """A node that was away has been counted from 0 again."""
    return {name: max(0, number - old.get(name, 0)) for name, number in new.items()}


def _minus(new: dict[str, list[float]], old: dict[str, list[float]]) -> Histogram:
    """`old` may be from before the first observation, and have no bounds."""
    before = old["counts"] or [0] * len(new["counts"])
    return Histogram(tuple(new["bounds"]), tuple(int(a - b) for a, b in zip(new["counts"], before, strict=True)))


def _sum(histograms: Iterable[Histogram]) -> Histogram:
    found = [histogram for histogram in histograms if histogram.counts]
    if not found:
        return Histogram((), ())
    return Histogram(found[-1].bounds, tuple(map(sum, zip(*(each.counts for each in found), strict=True))))
