"""Charts for the documentation, drawn as the console draws its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1360, 360
LEFT, RIGHT, TOP, BOTTOM = 84, 1336, 92, 304
"""The edges of what is plotted."""

_STYLE = """
text { font: 17px 'DejaVu Sans', Verdana, sans-serif; fill: #59636e }
.title { font-size: 22px; font-weight: bold; fill: #1b1f24 }
.mark { fill: #1b1f24 }
"""


def stacked_shares(
    title: str,
    colours: Mapping[str, str],
    steps: Sequence[tuple[float, Counter[str]]],
    step_s: float,
    marks: Mapping[float, str],
) -> str:
    """Returns an SVG with a bar for each step of time, each a stack of shares.

    Args:
        title: of the chart.
        colours: those of the series, in the order of the stack from below.
        steps: the second in which each step begins, and the number of each series in it.
        step_s: the seconds of a step.
        marks: what happened at some seconds.
    """
    end_s = steps[-1][0] + step_s

    def x(second: float) -> float:
        return LEFT + (RIGHT - LEFT) * second / end_s

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    parts = [f'<text class="title" x="24" y="44">{escape(title)}</text>']
    at = float(RIGHT)
    for name in reversed(colours):
        at -= 10 * len(name) + 44
        parts.append(f'<rect x="{at:.0f}" y="28" width="16" height="16" rx="4" fill="{colours[name]}"/>')
        parts.append(f'<text x="{at + 24:.0f}" y="43">{escape(name)}</text>')
    for percent in (0, 50, 100):
        height = y(percent / 100)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="#d1d9e0"/>')
        parts.append(f'<text x="{LEFT - 12}" y="{height + 6:.1f}" text-anchor="end">{percent} %</text>')
    for begins, counts in steps:
        below = 0.0
        for name, colour in colours.items():
            share = counts[name] / counts.total()
            height = y(below) - y(below + share)
            width = x(step_s) - x(0) - 1
            corner = f'x="{x(begins):.1f}" y="{y(below + share):.1f}"'
            if share:
                parts.append(f'<rect {corner} width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')
            below += share
    tick = next(tick for tick in (1, 2, 5, 10, 20, 60, 3600) if end_s / tick <= 8)
    for second in range(0, int(end_s) + 1, tick):
        parts.append(f'<text x="{x(second):.1f}" y="{BOTTOM + 28}" text-anchor="middle">{second} s</text>')
    for second, text in marks.items():
        parts.append(f'<path d="M{x(second):.1f} {TOP - 12}V{BOTTOM}" stroke="#1b1f24" stroke-dasharray="5 4"/>')
        parts.append(f'<text class="mark" x="{x(second) + 8:.1f}" y="{TOP - 8}">{escape(text)}</text>')
    frame = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" fill="#ffffff" stroke="#d1d9e0"/>'
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", frame, *parts, "</svg>"]) + "\n"


COLOURS = ("#2f6fce", "#c0271b", "#0b7f83", "#9a5bd0", "#b7791f", "#5d7a1f", "#c2408e", "#59636e")
"""The colours of the lines of a panel, in order."""

_PANEL_WIDTH, _PANEL_HEIGHT = 452, 236
_SMALL_STYLE = """
text { font: 13px 'DejaVu Sans', Verdana, sans-serif; fill: #59636e }
.title { font-size: 22px; font-weight: bold; fill: #1b1f24 }
.panel { font-size: 15px; font-weight: bold; fill: #1b1f24 }
path { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.mark { stroke: #59636e; stroke-width: 1; stroke-dasharray: 3 3 }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over a common axis.

    Attributes:
        title: with the unit of the values.
        lines: their points, by name; the value of a point may be missing by leaving it out.
        x_unit: the unit of the axis below.
        logarithmic: whether the axis below is, with a tick at each power of two.
        marks: places on the axis below that are marked by a line.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_unit: str
    logarithmic: bool = False
    marks: Sequence[float] = ()


def small_multiples(title: str, panels: Sequence[Panel], columns: int = 3) -> str:
    """Returns an SVG with panels of lines, row by row. Each panel has its own axes, from 0 up."""
    rows = -(-len(panels) // columns)
    width, height = columns * _PANEL_WIDTH + 4, rows * _PANEL_HEIGHT + 72
    parts = [f'<text class="title" x="24" y="44">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        corner = (2 + number % columns * _PANEL_WIDTH, 64 + number // columns * _PANEL_HEIGHT)
        parts += [f'<g transform="translate({corner[0]} {corner[1]})">', *_panel(panel), "</g>"]
    frame = f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12" fill="#ffffff" stroke="#d1d9e0"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<style>{_SMALL_STYLE}</style>", frame, *parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> Iterator[str]:
    left, right, top, bottom = 64, _PANEL_WIDTH - 20, 54, _PANEL_HEIGHT - 34
    points = [point for line in panel.lines.values() for point in line]
    ends = [x for x, _ in points]
    first, last = (min(ends), max(ends)) if panel.logarithmic else (0.0, max(ends))
    highest = max(value for _, value in points)
    step = _round_step(highest / 3)
    most = max(step, math.ceil(highest / step - 1e-9) * step)

    def x(place: float) -> float:
        share = math.log2(place / first) / math.log2(last / first) if panel.logarithmic else place / last
        return left + (right - left) * share

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / most

    yield f'<text class="panel" x="24" y="20">{escape(panel.title)}</text>'
    at = 24.0
    for name, colour in zip(panel.lines, COLOURS, strict=False):
        if len(panel.lines) > 1:
            yield f'<rect x="{at:.0f}" y="30" width="10" height="10" rx="3" fill="{colour}"/>'
            yield f'<text x="{at + 14:.0f}" y="40">{escape(name)}</text>'
            at += 7.6 * len(name) + 28
    for number in range(round(most / step) + 1):
        value = number * step
        yield f'<path class="grid" d="M{left} {y(value):.1f}H{right}"/>'
        yield f'<text x="{left - 8}" y="{y(value) + 5:.1f}" text-anchor="end">{_short(value)}</text>'
    for number, place in enumerate(_ticks(first, last, logarithmic=panel.logarithmic)):
        label = _short(place) if number else f"{place:g} {panel.x_unit}"
        yield f'<text x="{x(place):.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>'
    marks = (min(place, last) for place in panel.marks)
    yield from (f'<path class="mark" d="M{x(place):.1f} {top}V{bottom}"/>' for place in marks)
    for line, colour in zip(panel.lines.values(), COLOURS, strict=False):
        path = "L".join(f"{x(place):.0f} {y(value):.1f}" for place, value in line)
        yield f'<path d="M{path}" stroke="{colour}"/>'


def _round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 2.5 and 5 times a power of ten that is not below."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _ticks(first: float, last: float, *, logarithmic: bool) -> list[float]:
    if logarithmic:
        return [2.0**power for power in range(math.ceil(math.log2(first)), math.floor(math.log2(last)) + 1)]
    step = _round_step(last / 6)
    return [number * step for number in range(math.floor(last / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A number of few characters: 1500000 is 1.5 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 10 * size or (value >= size and value % (size / 10) == 0):
            return f"{value / size:g}{unit}"
    return f"{value:g}"
