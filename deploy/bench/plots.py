"""What the plots of a report show; `page` and `png` draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.bench.figures import LATENCIES, latencies
from deploy.bench.load import Outcome

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of the runs, in turn; told apart by the colour-blind, too."""
_POINTS = 200

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """`lines`: points by the name of their run, x in `unit`. `dots`: they are not to be connected."""

    title: str
    unit: str
    lines: Mapping[str, Points]
    dots: bool = False


def plots_of(runs: Mapping[str, Sequence[Outcome]]) -> list[Plot]:
    """The distribution of each latency, and TTFT over the run. `runs`: outcomes by the name of their run; failed
    requests are left out."""
    answered = {run: [outcome for outcome in outcomes if not outcome.error] for run, outcomes in runs.items()}
    plots = [
        Plot(
            f"{label}: share of values below",
            "ms",
            {run: _distribution(latencies(outcomes)[name]) for run, outcomes in answered.items()},
        )
        for name, label in LATENCIES.items()
    ]
    times = {run: [(outcome.sent, outcome.ttft * 1e3) for outcome in outcomes] for run, outcomes in answered.items()}
    return [*plots, Plot("TTFT in ms over the run", "s", times, dots=True)]


def _distribution(values: Sequence[float]) -> Points:
    """Points of the cumulative distribution, in milliseconds."""
    ordered, last = sorted(values), len(values) - 1
    indices = sorted({round(last * point / _POINTS) for point in range(_POINTS + 1)}) if ordered else []
    return [(ordered[index] * 1e3, (index + 1) / len(ordered)) for index in indices]
