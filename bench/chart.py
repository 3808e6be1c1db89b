"""A chart for the documentation, drawn as the console draws its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
