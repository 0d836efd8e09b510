"""The plots of a report as one picture, drawn by matplotlib, which the extra `plots` brings."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deploy.bench.load import Outcome
from deploy.bench.plots import COLORS, Plot, plots_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_INCHES = (6.0, 3.2)  # of one plot
_DPI = 120


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def png(title: str, runs: Mapping[str, Sequence[Outcome]]) -> bytes:
    """The file's content. Needs matplotlib."""
    from matplotlib.figure import Figure

    plots = plots_of(runs)
    rows = -(-len(plots) // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _INCHES[0], rows * _INCHES[1]), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    for number, plot in enumerate(plots):
        _draw(figure.add_subplot(rows, _COLUMNS, number + 1), plot)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Axes, plot: Plot) -> None:
    for number, (name, points) in enumerate(plot.lines.items()):
        x, y = [point[0] for point in points], [point[1] for point in points]
        style: dict[str, Any] = {"marker": ".", "linestyle": "none"} if plot.dots else {}
        axes.plot(x, y, label=name, color=COLORS[number % len(COLORS)], **style)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.unit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
