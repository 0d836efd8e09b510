"""The report as one page of HTML: a table and plots in SVG, without scripts and other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from deploy.bench.load import Outcome
from deploy.bench.plots import COLORS, Plot, plots_of

_WIDTH, _HEIGHT, _MARGIN = 520, 260, 48
_STYLE = """body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
pre{overflow-x:auto}svg{max-width:100%;height:auto;margin:.5rem}text{fill:currentColor;font-size:12px}
.axis{stroke:currentColor;fill:none}"""


def page(title: str, report: str, runs: Mapping[str, Sequence[Outcome]]) -> str:
    """`report`: the text that the command printed. `runs`: outcomes by the name of their run."""
    plots = [_svg(plot) for plot in plots_of(runs)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><pre>{escape(report)}</pre>{''.join(plots)}</html>\n"
    )


def _svg(plot: Plot) -> str:
    points = [point for line in plot.lines.values() for point in line]
    top_x = max((x for x, _ in points), default=0.0) or 1.0
    top_y = max((y for _, y in points), default=0.0) or 1.0
    left, right, top, bottom = _MARGIN, _WIDTH - 12, 28, _HEIGHT - _MARGIN
    parts = [
        f'<text x="{left}" y="16">{escape(plot.title)}</text>',
        f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>',
        f'<text x="{left}" y="{bottom + 16}">0</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{top_x:.4g} {plot.unit}</text>',
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{top_y:.3g}</text>',
    ]
    for number, (name, line) in enumerate(plot.lines.items()):
        color = COLORS[number % len(COLORS)]
        placed = [(left + x / top_x * (right - left), bottom - y / top_y * (bottom - top)) for x, y in line]
        if plot.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in placed]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        place = left + number * 90
        parts.append(f'<text x="{place}" y="{_HEIGHT - 8}" style="fill:{color}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(plot.title)}">' + (
        "".join(parts) + "</svg>"
    )
