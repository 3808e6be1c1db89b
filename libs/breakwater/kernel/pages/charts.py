"""Charts: `charts.js` draws those over time from tables of values, with Chart.js; small ones are SVG.

The table gives the values to readers who don't see the chart; without scripts it is open.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from breakwater.kernel import formats
from breakwater.kernel.pages import words
from breakwater.kernel.pages.time_range import between
from breakwater.kernel.types import ms_from_time

LIBRARY_PACKAGE = "chartkick"
"""The Python package that contains Chart.js: the only one that can be installed without npm."""
LIBRARY_FOLDER = "django/static/chartkick"
LIBRARY = "Chart.bundle.js"
_LIBRARY_MAJOR = b"Chart.js v4."

_DAY = timedelta(days=1)

_MACROS: Any = (
    Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, trim_blocks=True)
    .get_template("chart.html")
    .module
)
Style = Literal["bars", "line", "thin", "area", "dashed", "between"]
"""`between` is a line, and the area from it to the series before: red where it is higher, green where it is lower."""
COLOURS = ("plain", "second", "third", "fourth", "fifth", "faint")
"""Colours without a meaning; the last one is for the sum of the other series."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The way to write values: in full in the table, and in short on the axis."""

    name: Literal["count", "money", "duration"]
    """The name of the unit in `charts.js`."""
    text: Callable[[float], str]
    exact: Callable[[float], str] = lambda _: ""
    """Writes the exact value for a tooltip, if `text` rounds it."""


COUNT = Unit("count", lambda number: f"{number:,g}")
MONEY = Unit("money", lambda nano: formats.money(round(nano)), lambda nano: formats.exact_money(round(nano)))
DURATION = Unit("duration", words.duration)
"""The unit of durations in milliseconds."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of values over time, one for each of the chart's moments."""

    name: str
    colour: str
    """A colour of console.css: `good`, `bad`, `warn`; or one of `COLOURS`."""
    values: Sequence[float | None]
    """The values; None for gaps."""
    style: Style = "line"
    filters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Filters that select the series' executions among those of the chart."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, which a chart marks at its time."""

    at: datetime
    label: str
    """A few words beside the mark."""
    text: str
    """A sentence below the chart."""


def library_version() -> str:
    """Hashes the library.

    Raises:
        RuntimeError: if it is missing, or not the version that `charts.js` requires.
    """
    try:
        source = (files(LIBRARY_PACKAGE) / LIBRARY_FOLDER / LIBRARY).read_bytes()
    except (ModuleNotFoundError, OSError) as error:
        raise RuntimeError(f"{_INSTALL}: {LIBRARY_FOLDER}/{LIBRARY} is not in it ({error})") from error
    if _LIBRARY_MAJOR not in source[:200]:
        raise RuntimeError(f"{_INSTALL}: {LIBRARY_FOLDER}/{LIBRARY} is not {_LIBRARY_MAJOR.decode()}x")
    return hashlib.sha256(source).hexdigest()[:12]


_INSTALL = f"install {LIBRARY_PACKAGE} as requirements/runtime.txt has it"


def over_time(
    label: str,
    moments: Sequence[datetime],
    series: Sequence[Series],
    unit: Unit,
    *,
    step: timedelta,
    executions: Mapping[str, str] | None = None,
    zooms: bool = True,
    marks: Sequence[Mark] = (),
    note: str = "",
) -> Markup:
    """Draws values for each step of a time range.

    Args:
        label: the title.
        moments: the start of each step.
        series: the series, with one value for each step. Bars are stacked.
        unit: the unit of the values.
        step: the duration of a step.
        executions: filters that select the chart's executions.
        zooms: True if the pointer can select a part of the chart as the page's time range.
        marks: events within the time range.
        note: an explanation of the series, below the figures.
    """
    rows = [_Row(moment + step / 2, _time_label(moment, step), (moment, moment + step)) for moment in moments]
    span = (moments[0], moments[-1] + step) if moments else None
    return _figure(label, rows, series, unit, span, executions or {}, zooms=zooms, marks=marks, note=note)


def burn(
    label: str,
    points: Sequence[tuple[datetime, float]],
    *,
    start: datetime,
    end: datetime,
    cap: float | None = None,
    forecast: Sequence[tuple[datetime, float]] = (),
    executions: Mapping[str, str] | None = None,
) -> Markup:
    """Draws a sum of money that grows through a period, with its limit and its forecast.

    Args:
        label: the title.
        points: times in order, and the sum at each in nano-dollars, like `cap` and `forecast`.
        start: start of the period.
        end: end of the period.
        cap: the limit, which is drawn as a horizontal line.
        forecast: future times and the expected sum at each, the last one at the end.
        executions: filters that select the chart's executions.
    """
    future = list(forecast) or ([(end, None)] if cap is not None else [])
    moments = [moment for moment, _ in (*points, *future)]
    begins = [start, *moments]
    rows = [
        _Row(moment, _time_label(moment, timedelta()), (begins[index], moment) if begins[index] < moment else None)
        for index, moment in enumerate(moments)
    ]
    spent = [value for _, value in points]
    series = [Series("spent", "plain", [*spent, *[None] * len(future)], "area")]
    if cap is not None:
        series.append(Series(f"limit {MONEY.text(cap)}", "bad", [cap] * len(moments), "dashed"))
    if forecast and spent:
        line = [*[None] * (len(spent) - 1), spent[-1], *(value for _, value in forecast)]
        series.append(Series(f"forecast {MONEY.text(forecast[-1][1])}", "warn", line, "dashed"))
    return _figure(label, rows, series, MONEY, (start, end), executions or {}, zooms=False)


def sparkline(values: Sequence[float], bad: Sequence[float], label: str) -> Markup:
    """Draws small columns without labels, with the bad part of each in its own colour.

    Args:
        values: the value of each column.
        bad: the bad part of each value.
        label: a description for screen readers.
    """
    highest = max(max(values, default=0), 1)
    width = 100 / max(len(values), 1)
    rects = [
        (colour, index * width, 20 - (base + part) / highest * 20, width * 0.8, part / highest * 20)
        for index, (value, bad_part) in enumerate(zip(values, bad, strict=True))
        for colour, base, part in (("bad", 0.0, bad_part), ("good", bad_part, value - bad_part))
        if part > 0
    ]
    return _svg("sparkline", 100, 20, rects, label)


def share(parts: Sequence[tuple[str, float]], label: str, *, full_value: float | None = None) -> Markup:
    """Draws a bar with the parts of a sum.

    Args:
        parts: the colour and the value of each part, from the left.
        label: a description for screen readers.
        full_value: the value of a full bar; by default the sum of the parts.
    """
    total = full_value if full_value is not None else sum(value for _, value in parts)
    rects: list[_Rect] = [("rest", 0, 0, 100, 10)]
    x = 0.0
    for colour, value in parts:
        width = min(value / total * 100, 100 - x) if total else 0.0
        if width > 0:
            rects.append((colour, x, 0, width, 10))
        x += width
    return _svg("share", 100, 10, rects, label)


def waterfall_bar(bar: AxisSpan, answer: AxisSpan | None, colour: str, *, quarters: bool) -> Markup:
    """Draws a row of a waterfall. Screen readers omit it, because the row's other cells have its figures.

    Args:
        bar: the place of a wait or a call.
        answer: the part of a call in which its answer arrived; it has the full colour, and a mark at its beginning.
        colour: the colour of the bar.
        quarters: True to mark the quarters of the axis.
    """
    rects: list[_Rect] = [("rest", quarter * (WIDTH - 2) / 4, 0, 2, 20) for quarter in range(5) if quarters]
    if answer is None:
        rects.append((colour, bar.x, 4, bar.width, 12))
    else:
        rects.append((f"{colour} silent", bar.x, 4, bar.width, 12))
        rects.append((colour, answer.x, 4, answer.width, 12))
        rects.append(("mark", answer.x, 0, 4, 20))
    return _svg("waterfall", WIDTH, 20, rects)


_Rect = tuple[str, float, float, float, float]
"""A colour, x, y, width and height."""


def _svg(kind: str, width: int, height: int, rects: Iterable[_Rect], label: str = "") -> Markup:
    formatted = [(colour, *(f"{size:.2f}".rstrip("0").rstrip(".") for size in sizes)) for colour, *sizes in rects]
    return _MACROS.svg(kind, width, height, formatted, label)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a chart's table: the values of one moment."""

    at: datetime
    """The time at which the values are drawn."""
    text: str
    span: tuple[datetime, datetime] | None
    """The time in which the values' executions ended; None if there can be none."""


def _figure(
    label: str,
    rows: Sequence[_Row],
    series: Sequence[Series],
    unit: Unit,
    span: tuple[datetime, datetime] | None,
    executions: Mapping[str, str],
    *,
    zooms: bool,
    marks: Sequence[Mark] = (),
    note: str = "",
) -> Markup:
    start, end = map(ms_from_time, span) if span else (0, 0)
    table = [
        (
            ms_from_time(row.at),
            row.text,
            row.span and f"/executions?{urlencode({**executions, **between(*row.span)})}",
            [
                (None, "", "") if value is None else (value, unit.text(value), unit.exact(value))
                for value in (line.values[index] for line in series)
            ],
        )
        for index, row in enumerate(rows)
    ]
    identity = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    events = [(ms_from_time(mark.at), _time_label(mark.at, timedelta()), mark.label, mark.text) for mark in marks]
    return _MACROS.figure(label, identity, unit.name, start, end, zooms, series, table, events, note)


def _time_label(moment: datetime, step: timedelta) -> str:
    at = moment.astimezone(UTC)
    if step >= _DAY:
        return at.strftime("%b %d")
    return at.strftime("%b %d %H:%M:%S" if timedelta() < step < timedelta(minutes=1) else "%b %d %H:%M")


WIDTH = 1000
"""Width of the axis."""


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """A span on the axis."""

    x: float
    width: float
