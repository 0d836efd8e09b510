"""Plots lines over batch sizes as SVG, on a transparent background, in colors that work on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 44, 52
TEXT, GRID = "#7d8590", "#7d859040"
LABEL_DISTANCE = 18
MAX_GRID_LINES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """`values`: one for each tick on the x axis."""

    name: str
    values: Sequence[float]
    color: str
    dashed: bool = False


def plot(title: str, x_label: str, y_label: str, ticks: Sequence[str], lines: Sequence[Line]) -> str:
    """The SVG text. The y axis begins at 0; the ticks on the x axis are evenly spaced."""
    step = _grid_step(max(max(line.values) for line in lines))
    top = step * math.ceil(max(max(line.values) for line in lines) / step)
    xs = [LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(ticks) for i in range(len(ticks))]

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
        *(_grid_line(i * step, y_of(i * step)) for i in range(round(top / step) + 1)),
        *_axis_labels(x_label, y_label),
    ]
    for x, tick in zip(xs, ticks, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{escape(tick)}</text>')
    for line in lines:
        parts += _line(line, xs, [y_of(value) for value in line.values], ticks)
    parts += _names(lines, xs[-1], [y_of(line.values[-1]) for line in lines])
    return "\n".join([*parts, "</svg>", ""])


def _grid_line(value: float, y: float) -> str:
    return (
        f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    )


def _grid_step(largest: float) -> float:
    """The distance of grid lines: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / MAX_GRID_LINES))
    return next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= MAX_GRID_LINES)


def _axis_labels(x_label: str, y_label: str) -> list[str]:
    x, y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{x:g}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(18 {y:g}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _line(line: Line, xs: Sequence[float], ys: Sequence[float], ticks: Sequence[str]) -> list[str]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
    drawn = [f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="2.5"{dashes}/>']
    for x, y, tick, value in zip(xs, ys, ticks, line.values, strict=True):
        title = f"<title>{escape(line.name)}, {escape(tick)}: {value:.2f}</title>"
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.color}">{title}</circle>')
    return drawn


def _names(lines: Sequence[Line], x: float, ys: Sequence[float]) -> list[str]:
    """Labels at the ends of the lines, moved apart where two would overlap."""
    drawn, lowest = [], math.inf
    for y, line in sorted(zip(ys, lines, strict=True), key=lambda pair: -pair[0]):  # from the bottom up
        lowest = min(y, lowest - LABEL_DISTANCE)
        drawn.append(
            f'<text x="{x + 12:.1f}" y="{lowest + 4:.1f}" font-weight="600" fill="{line.color}">'
            f"{escape(line.name)} {line.values[-1]:.2f}</text>"
        )
    return drawn
