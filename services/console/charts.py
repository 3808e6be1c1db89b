"""Charts as SVG, without scripts, fonts or downloads, in the page's own light and dark colours.

The drawing stretches to the available width, and labels are text beside it, so that they stay readable on a phone. The
values of each chart are in a table below it, for those who can't see it or want to copy them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from markupsafe import Markup

WIDTH, HEIGHT = 1000, 200
_NOTHING = 1e-9
"""Below a nano-dollar, a millisecond, one of anything."""
_SPANS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400)
"""Round durations: those of a clock."""
_DAY_S = 86_400
_LABELS = 5
"""How many times are written below a chart."""

Unit = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One row of values over time, by the chart's moments."""

    name: str
    colour: str
    """A class of console.css: `good`, `bad`, `warn`, `plain`, `second`."""
    values: Sequence[float | None]
    """None for gaps."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time on a timeline."""

    start: float
    end: float
    colour: str
    text: str


def nice(value: float) -> float:
    """The next round number from a value up, for the top of an axis: 1, 2 or 5 times a power of ten; 1 for nothing."""
    if value < _NOTHING:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def nice_seconds(value: float) -> float:
    """The same for seconds: 15 s, 2 min, 6 h, 5 d; 1 for nothing."""
    if value <= _SPANS_S[0]:
        return nice(value)
    if value > _SPANS_S[-1]:
        return nice(value / _DAY_S) * _DAY_S
    return next(span for span in _SPANS_S if span >= value)


def columns(
    label: str,
    moments: Sequence[datetime],
    series: Sequence[Series],
    unit: Unit,
    *,
    step: timedelta,
    nice: Callable[[float], float] = nice,
) -> Markup:
    """Columns over time; several series are stacked.

    Args:
        label: the title.
        moments: the start of each column.
        series: with one value for each column.
        unit: how a value is written.
        step: the duration of each column.
        nice: rounds the highest value up to the top of the axis, such as `nice_seconds`.
    """
    sums = [sum(one.values[index] or 0 for one in series) for index in range(len(moments))]
    top = nice(max(sums, default=0))
    width = WIDTH / max(len(moments), 1)
    drawn: list[Markup] = []
    for index, moment in enumerate(moments):
        values = ", ".join(f"{one.name} {unit(one.values[index] or 0)}" for one in series)
        base = float(HEIGHT)
        parts: list[Markup] = []
        for one in series:
            height = (one.values[index] or 0) / top * HEIGHT
            if height <= 0:
                continue
            base -= height
            parts.append(_rect(one.colour, index * width + width * 0.08, base, width * 0.84, height))
        # Over the whole height, so that the tooltip of a low column can be reached.
        parts.append(_rect("touch", index * width, 0, width, HEIGHT))
        drawn.append(_titled(f"{_when(moment, step)}: {values}", *parts))
    return _figure(label, Markup("").join(drawn), moments, series, unit, top, step)


def lines(
    label: str,
    moments: Sequence[datetime],
    series: Sequence[Series],
    unit: Unit,
    *,
    step: timedelta,
    nice: Callable[[float], float] = nice,
) -> Markup:
    """Lines over time, with gaps for missing values. Arguments as for `columns`."""
    top = nice(max((value for one in series for value in one.values if value is not None), default=0))
    width = WIDTH / max(len(moments), 1)
    drawn: list[Markup] = []
    for one in series:
        points = [
            None if value is None else ((index + 0.5) * width, HEIGHT - value / top * HEIGHT)
            for index, value in enumerate(one.values)
        ]
        drawn.append(Markup('<path class="line {}" d="{}"/>').format(one.colour, _path(points)))
        # A line through a single point is hard to see.
        around = [None, *points, None]
        alone = [point for before, point, after in zip(around, around[1:], around[2:], strict=False) if before is after]
        dots = "".join(_path([point]) for point in alone)
        drawn.append(Markup('<path class="line dot {}" d="{}"/>').format(one.colour, dots))
    for index, moment in enumerate(moments):
        values = ", ".join(f"{one.name} {unit(value)}" for one in series if (value := one.values[index]) is not None)
        text = f"{_when(moment, step)}: {values or 'nothing'}"
        drawn.append(_titled(text, _rect("touch", index * width, 0, width, HEIGHT)))
    return _figure(label, Markup("").join(drawn), moments, series, unit, top, step)


def sparkline(values: Sequence[float], bad: Sequence[float], label: str) -> Markup:
    """Small columns without labels, with the bad part of each in its own colour.

    Args:
        values: all of each.
        bad: how much of each is bad.
        label: a description, for screen readers.
    """
    top = max(max(values, default=0), 1)
    width = 100 / max(len(values), 1)
    parts: list[Markup] = []
    for index, (value, wrong) in enumerate(zip(values, bad, strict=True)):
        for colour, base, part in (("bad", 0.0, wrong), ("good", wrong, value - wrong)):
            if part > 0:
                height = part / top * 20
                parts.append(_rect(colour, index * width, 20 - (base + part) / top * 20, width * 0.8, height))
    return Markup(
        '<svg class="sparkline" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(label, Markup("").join(parts))


def share(parts: Sequence[tuple[str, float]], label: str, *, of: float | None = None) -> Markup:
    """One bar that shows what something consists of.

    Args:
        parts: a colour and a value each, from the left.
        label: a description, for screen readers.
        of: the value of a full bar; the sum of the parts by default.
    """
    whole = of if of is not None else sum(value for _, value in parts)
    drawn: list[Markup] = []
    at = 0.0
    for colour, value in parts:
        width = min(value / whole * 100, 100 - at) if whole else 0.0
        if width > 0:
            drawn.append(_rect(colour, at, 0, width, 10))
        at += width
    return Markup(
        '<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="rest" x="0" y="0" width="100" height="10"/>{}</svg>'
    ).format(label, Markup("").join(drawn))


def burn(
    label: str,
    points: Sequence[tuple[datetime, float]],
    *,
    start: datetime,
    end: datetime,
    unit: Unit,
    cap: float | None = None,
    forecast: Sequence[tuple[datetime, float]] = (),
) -> Markup:
    """How a sum grows through a period, with its cap and its forecast.

    Args:
        label: the title.
        points: times and the sum at each, in order.
        start: of the period.
        end: of the period.
        unit: how a value is written.
        cap: drawn as a line across.
        forecast: times to come and the sum expected at each, the last one at the end.
    """
    highest = max([value for _, value in (*points, *forecast)] + [cap or 0], default=0)
    top = nice(highest)
    length = max((end - start).total_seconds(), 1)

    def place(moment: datetime, value: float) -> tuple[float, float]:
        return (moment - start).total_seconds() / length * WIDTH, HEIGHT - value / top * HEIGHT

    drawn: list[Markup] = []
    placed = [place(moment, value) for moment, value in points]
    if placed:
        area = [(placed[0][0], float(HEIGHT)), *placed, (placed[-1][0], float(HEIGHT))]
        drawn.append(Markup('<path class="area plain" d="{}"/>').format(_path(area)))
        drawn.append(Markup('<path class="line plain" d="{}"/>').format(_path(placed)))
    if placed and forecast:
        ahead = [placed[-1], *(place(moment, value) for moment, value in forecast)]
        drawn.append(Markup('<path class="line forecast" d="{}"/>').format(_path(ahead)))
    if cap is not None:
        across = [(0.0, HEIGHT - cap / top * HEIGHT), (float(WIDTH), HEIGHT - cap / top * HEIGHT)]
        drawn.append(Markup('<path class="line cap" d="{}"/>').format(_path(across)))
    moments = [start + (end - start) * index / (_LABELS - 1) for index in range(_LABELS)]
    legend = [("plain", "spent")]
    if cap is not None:
        legend.append(("cap", f"cap {unit(cap)}"))
    if forecast:
        legend.append(("forecast", f"forecast {unit(forecast[-1][1])}"))
    rows = [(_day_and_time(moment), [unit(value)]) for moment, value in points]
    return _frame(
        label, Markup("").join(drawn), top, unit, [_day_and_time(one) for one in moments], legend, ["spent"], rows
    )


def timeline(rows: Sequence[Sequence[Bar]], label: str, unit: Unit) -> Markup:
    """Rows of bars on one time axis: what followed what, and how long it took.

    Args:
        rows: from the top; times in milliseconds from the beginning.
        label: a description, for screen readers.
        unit: how a time is written.
    """
    end = max((bar.end for row in rows for bar in row), default=0) or 1

    def length(bar: Bar) -> float:
        return max((bar.end - bar.start) / end * WIDTH, 3)

    drawn = [
        # At least three wide, also at the very end, so that it is seen even if it took no time at all.
        _titled(bar.text, _rect(bar.colour, min(bar.start / end * WIDTH, WIDTH - 3), index * 20 + 3, length(bar), 14))
        for index, row in enumerate(rows)
        for bar in row
    ]
    return Markup(
        '<svg class="timeline" viewBox="0 0 {0} {1}" height="{1}" preserveAspectRatio="none" role="img"'
        ' aria-label="{2}">{3}</svg>'
        '<div class="xs whole"><span>0</span><span>{4}</span><span>{5}</span></div>'
    ).format(WIDTH, max(len(rows), 1) * 20, label, Markup("").join(drawn), unit(end / 2), unit(end))


def _figure(
    label: str,
    drawn: Markup,
    moments: Sequence[datetime],
    series: Sequence[Series],
    unit: Unit,
    top: float,
    step: timedelta,
) -> Markup:
    chosen = [round(index * (len(moments) - 1) / (_LABELS - 1)) for index in range(_LABELS)] if moments else []
    times = [_axis(moments[index], step) for index in dict.fromkeys(chosen)]
    rows = [
        (_when(moment, step), ["" if (value := one.values[index]) is None else unit(value) for one in series])
        for index, moment in enumerate(moments)
    ]
    legend = [(one.colour, one.name) for one in series]
    return _frame(label, drawn, top, unit, times, legend, [one.name for one in series], rows)


def _frame(
    label: str,
    drawn: Markup,
    top: float,
    unit: Unit,
    times: Sequence[str],
    legend: Sequence[tuple[str, str]],
    names: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
) -> Markup:
    marks = Markup("").join(Markup('<span><i class="{}"></i>{}</span>').format(*one) for one in legend)
    grid = Markup('<path class="grid" d="M0 0H{w}M0 {h}H{w}"/>').format(w=WIDTH, h=HEIGHT // 2)
    head = Markup("").join(Markup("<th scope=col>{}</th>").format(name) for name in names)
    body = Markup("").join(
        Markup("<tr><th scope=row>{}</th>{}</tr>").format(
            when, Markup("").join(Markup("<td>{}</td>").format(value) for value in values)
        )
        for when, values in rows
    )
    return Markup(
        '<figure class="chart"><figcaption><b>{label}</b><span class="legend">{marks}</span></figcaption>'
        '<div class="plot"><div class="ys"><span>{top}</span><span>{half}</span><span>0</span></div>'
        '<svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        "{grid}{drawn}</svg></div>"
        '<div class="xs">{times}</div>'
        '<details class="figures"><summary>Figures</summary><div class="scroll" tabindex="0"><table>'
        "<thead><tr><th scope=col>UTC</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details></figure>"
    ).format(
        label=label,
        marks=marks,
        top=unit(top),
        half=unit(top / 2),
        w=WIDTH,
        h=HEIGHT,
        grid=grid,
        drawn=drawn,
        times=Markup("").join(Markup("<span>{}</span>").format(one) for one in times),
        head=head,
        body=body,
    )


def _rect(colour: str, x: float, y: float, width: float, height: float) -> Markup:
    of = colour, _n(x), _n(y), _n(width), _n(height)
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(*of)


def _titled(text: str, *parts: Markup) -> Markup:
    """Parts of a chart, with a tooltip."""
    return Markup("<g><title>{}</title>{}</g>").format(text, Markup("").join(parts))


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """A line through the points, with a gap for each None. A single point is a dot."""
    commands: list[str] = []
    around = [None, *points, None]
    for before, point, after in zip(around, around[1:], around[2:], strict=False):
        if point is not None:
            commands.append(f"{'M' if before is None else 'L'}{_n(point[0])} {_n(point[1])}")
            if before is None and after is None:
                commands.append("h0.1")
    return "".join(commands)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _axis(moment: datetime, step: timedelta) -> str:
    at = moment.astimezone(UTC)
    if step >= timedelta(hours=12):
        return at.strftime("%b %d")
    return at.strftime("%b %d %H:%M" if step >= timedelta(minutes=30) else "%H:%M")


def _day_and_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%b %d %H:%M")


def _when(moment: datetime, step: timedelta) -> str:
    at = moment.astimezone(UTC)
    return at.strftime("%b %d") if step >= timedelta(days=1) else at.strftime("%b %d %H:%M")
