"""Charts. Those over time are tables of their values, which `charts.js` draws with Chart.js; small ones are SVG.

Readers who don't see a chart, or run no scripts, thus have its values. Without scripts the table is open.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from breakwater.kernel import formats
from breakwater.kernel.pages import words
from breakwater.kernel.pages.time_range import between
from breakwater.kernel.types import ms_from_time
from breakwater.records.pages.waterfall import WIDTH, WaterfallRow

LIBRARY_PACKAGE, LIBRARY_FOLDER, LIBRARY = "chartkick", "django/static/chartkick", "Chart.bundle.js"
"""Chart.js, in a Python package: the only one that can be installed without npm."""
_LIBRARY_MAJOR = b"Chart.js v4."

_DAY = timedelta(days=1)

_MACROS: Any = (
    Environment(loader=PackageLoader("services.console"), autoescape=True, trim_blocks=True)
    .get_template("chart.html")
    .module
)
Style = Literal["bars", "line", "area", "dashed"]
COLOURS = ("plain", "second", "third", "fourth", "fifth", "faint")
"""Colours without a meaning; the last one is for the others."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The way values are written: in full in the table, and in short on the axis."""

    name: Literal["count", "money", "duration"]
    """Its name in `charts.js`."""
    text: Callable[[float], str]
    exact: Callable[[float], str] = lambda _: ""
    """The same for a tooltip, where `text` is rounded."""


COUNT = Unit("count", lambda number: f"{number:,g}")
MONEY = Unit("money", lambda nano: formats.money(round(nano)), lambda nano: formats.exact_money(round(nano)))
DURATION = Unit("duration", words.duration)
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Series:
    """One row of values over time, by the chart's moments."""

    name: str
    colour: str
    """A colour of console.css: `good`, `bad`, `warn`; or one of `COLOURS`."""
    values: Sequence[float | None]
    """None for gaps."""
    style: Style = "line"
    filters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Filters of its executions among those of the chart."""


def library_version() -> str:
    """A hash of the library.

    Raises:
        RuntimeError: it is missing, or not the version that `charts.js` is made for.
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
) -> Markup:
    """A chart of each step of a time range.

    Args:
        label: the title.
        moments: the start of each step.
        series: with one value for each step. Bars are stacked.
        unit: of the values.
        step: the duration of each.
        executions: filters of the executions that it is about.
        zooms: True if the pointer can choose a part of it as the page's time range.
    """
    rows = [_Row(moment + step / 2, _when(moment, step), (moment, moment + step)) for moment in moments]
    span = (moments[0], moments[-1] + step) if moments else None
    return _figure(label, rows, series, unit, span, executions or {}, zooms=zooms)


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
    """A chart of a sum of money that grows through a period, with its cap and its forecast.

    Args:
        label: the title.
        points: times and the sum at each, in order; in nano-dollars, as `cap` and `forecast`.
        start: of the period.
        end: of the period.
        cap: drawn as a line across.
        forecast: times to come and the sum expected at each, the last one at the end.
        executions: filters of those that it is about.
    """
    ahead = list(forecast) or ([(end, None)] if cap is not None else [])
    moments = [moment for moment, _ in (*points, *ahead)]
    begins = [start, *moments]
    rows = [
        _Row(moment, _when(moment, timedelta()), (begins[index], moment) if begins[index] < moment else None)
        for index, moment in enumerate(moments)
    ]
    spent = [value for _, value in points]
    series = [Series("spent", "plain", [*spent, *[None] * len(ahead)], "area")]
    if cap is not None:
        series.append(Series(f"cap {MONEY.text(cap)}", "bad", [cap] * len(moments), "dashed"))
    if forecast and spent:
        line = [*[None] * (len(spent) - 1), spent[-1], *(value for _, value in forecast)]
        series.append(Series(f"forecast {MONEY.text(forecast[-1][1])}", "warn", line, "dashed"))
    return _figure(label, rows, series, MONEY, (start, end), executions or {}, zooms=False)


def sparkline(values: Sequence[float], bad: Sequence[float], label: str) -> Markup:
    """Small columns without labels, with the bad part of each in its own colour.

    Args:
        values: all of each.
        bad: the bad part of each.
        label: a description, for screen readers.
    """
    top, width = max(max(values, default=0), 1), 100 / max(len(values), 1)
    rects = [
        (colour, index * width, 20 - (base + part) / top * 20, width * 0.8, part / top * 20)
        for index, (value, wrong) in enumerate(zip(values, bad, strict=True))
        for colour, base, part in (("bad", 0.0, wrong), ("good", wrong, value - wrong))
        if part > 0
    ]
    return _svg("sparkline", 100, 20, rects, label)


def share(parts: Sequence[tuple[str, float]], label: str, *, of: float | None = None) -> Markup:
    """One bar that shows the parts of a whole.

    Args:
        parts: a colour and a value each, from the left.
        label: a description, for screen readers.
        of: the value of a full bar; the sum of the parts by default.
    """
    whole = of if of is not None else sum(value for _, value in parts)
    rects: list[_Rect] = [("rest", 0, 0, 100, 10)]
    at = 0.0
    for colour, value in parts:
        width = min(value / whole * 100, 100 - at) if whole else 0.0
        if width > 0:
            rects.append((colour, at, 0, width, 10))
        at += width
    return _svg("share", 100, 10, rects, label)


def waterfall_bar(row: WaterfallRow, colour: str, *, quarters: bool) -> Markup:
    """One row of a waterfall. Its figures are in the row's other cells, so screen readers leave it out.

    Args:
        row: a wait or a call. The part of a call in which its answer came is of the full colour, with a mark at its
            beginning.
        colour: of a call.
        quarters: True to mark the quarters of the axis.
    """
    rects: list[_Rect] = [("rest", quarter * (WIDTH - 2) / 4, 0, 2, 20) for quarter in range(5) if quarters]
    if row.answer is None:
        rects.append((colour, row.bar.x, 4, row.bar.width, 12))
    else:
        rects.append((f"{colour} silent", row.bar.x, 4, row.bar.width, 12))
        rects.append((colour, row.answer.x, 4, row.answer.width, 12))
        rects.append(("mark", row.answer.x, 0, 4, 20))
    return _svg("waterfall", WIDTH, 20, rects)


_Rect = tuple[str, float, float, float, float]
"""A colour, x, y, width and height."""


def _svg(kind: str, width: int, height: int, rects: Iterable[_Rect], label: str = "") -> Markup:
    written = [(colour, *(f"{one:.2f}".rstrip("0").rstrip(".") for one in sizes)) for colour, *sizes in rects]
    return _MACROS.svg(kind, width, height, written, label)


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of one moment."""

    at: datetime
    """The place where they are drawn."""
    text: str
    span: tuple[datetime, datetime] | None
    """The time in which their executions ended; None if there can be none."""


def _figure(
    label: str,
    rows: Sequence[_Row],
    series: Sequence[Series],
    unit: Unit,
    span: tuple[datetime, datetime] | None,
    executions: Mapping[str, str],
    *,
    zooms: bool,
) -> Markup:
    start, end = map(ms_from_time, span) if span else (0, 0)
    table = [
        (
            ms_from_time(row.at),
            row.text,
            row.span and f"/executions?{urlencode({**executions, **between(*row.span)})}",
            [
                (None, "", "") if value is None else (value, unit.text(value), unit.exact(value))
                for value in (one.values[at] for one in series)
            ],
        )
        for at, row in enumerate(rows)
    ]
    identity = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    return _MACROS.figure(label, identity, unit.name, start, end, zooms, series, table)


def _when(moment: datetime, step: timedelta) -> str:
    at = moment.astimezone(UTC)
    if step >= _DAY:
        return at.strftime("%b %d")
    return at.strftime("%b %d %H:%M:%S" if timedelta() < step < timedelta(minutes=1) else "%b %d %H:%M")
