"""The report as one page of HTML: a table and plots in SVG, without scripts and other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from deploy.bench.figures import LATENCIES, latencies
from deploy.bench.load import Outcome

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT, _MARGIN = 520, 260, 48
_POINTS = 200
_STYLE = """body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
pre{overflow-x:auto}svg{max-width:100%;height:auto;margin:.5rem}text{fill:currentColor;font-size:12px}
.axis{stroke:currentColor;fill:none}"""


def page(title: str, report: str, runs: Mapping[str, Sequence[Outcome]]) -> str:
    """`report`: the text that the command printed. `runs`: outcomes by the name of their run."""
    plots = []
    for name, label in LATENCIES.items():
        lines = {run: _distribution(latencies(_answered(outcomes))[name]) for run, outcomes in runs.items()}
        plots.append(_plot(f"{label}: share of values below", "ms", lines))
    times = {run: [(o.sent, o.ttft * 1e3) for o in _answered(outcomes)] for run, outcomes in runs.items()}
    plots.append(_plot("TTFT over the run", "s", times, dots=True))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><pre>{escape(report)}</pre>{''.join(plots)}</html>\n"
    )


def _answered(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.error]


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the cumulative distribution, in milliseconds."""
    ordered, last = sorted(values), len(values) - 1
    indices = sorted({round(last * point / _POINTS) for point in range(_POINTS + 1)}) if ordered else []
    return [(ordered[index] * 1e3, (index + 1) / len(ordered)) for index in indices]


def _plot(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]], dots: bool = False) -> str:
    points = [point for line in lines.values() for point in line]
    top_x = max((x for x, _ in points), default=0.0) or 1.0
    top_y = max((y for _, y in points), default=0.0) or 1.0
    left, right, top, bottom = _MARGIN, _WIDTH - 12, 28, _HEIGHT - _MARGIN
    parts = [
        f'<text x="{left}" y="16">{escape(title)}</text>',
        f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>',
        f'<text x="{left}" y="{bottom + 16}">0</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{top_x:.4g} {unit}</text>',
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{top_y:.3g}</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        placed = [(left + x / top_x * (right - left), bottom - y / top_y * (bottom - top)) for x, y in line]
        if dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in placed]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        place = left + number * 90
        parts.append(f'<text x="{place}" y="{_HEIGHT - 8}" style="fill:{color}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}">' + (
        "".join(parts) + "</svg>"
    )
