"""Charts. Those over time are tables of their values, which `charts.js` draws with Chart.js; small ones are SVG.

So whoever doesn't see a chart, or runs no scripts, has its values. Without scripts the table is open.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Literal
from urllib.parse import urlencode

from markupsafe import Markup

from breakwater.contracts.types import ms_from_time
from services.console import words
from services.console.time_range import between
from services.console.waterfall import WIDTH, WaterfallRow

LIBRARY_PACKAGE, LIBRARY_FOLDER, LIBRARY = "chartkick", "django/static/chartkick", "Chart.bundle.js"
"""Chart.js, in a package of Python: nothing else that has it can be installed without npm."""
_LIBRARY_MAJOR = b"Chart.js v4."

_DAY = timedelta(days=1)

Style = Literal["bars", "line", "area", "dashed"]


@dataclass(frozen=True, slots=True)
class Unit:
    """How values are written: in full in the table, and in short on the axis."""

    name: Literal["count", "money", "duration"]
    """What `charts.js` knows it by."""
    text: Callable[[float], str]


COUNT = Unit("count", lambda number: f"{number:,g}")
MONEY = Unit("money", lambda nano: words.short_money(round(nano)))
DURATION = Unit("duration", words.duration)
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Series:
    """One row of values over time, by the chart's moments."""

    name: str
    colour: str
    """A colour of console.css: `good`, `bad`, `warn`, `plain`, `second`."""
    values: Sequence[float | None]
    """None for gaps."""
    style: Style = "line"
    filters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Which executions it is about, of those of the chart."""


def library_version() -> str:
    """A hash of the library.

    Raises:
        RuntimeError: it is not where it has to be, or not the one that `charts.js` is made for.
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
) -> Markup:
    """What happened in each step of the page's time range; a part of it can be chosen with the pointer.

    Args:
        label: the title.
        moments: the start of each step.
        series: with one value for each step. Bars are stacked.
        unit: of the values.
        step: the duration of each.
        executions: filters of those that it is about.
    """
    rows = [_Row(moment + step / 2, _when(moment, step), (moment, moment + step)) for moment in moments]
    span = (moments[0], moments[-1] + step) if moments else None
    return _figure(label, rows, series, unit, span, executions or {}, zooms=True)


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
    """How a sum of money grows through a period, with its cap and its forecast.

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


def waterfall_bar(row: WaterfallRow, colour: str, *, quarters: bool) -> Markup:
    """One row of a waterfall. What it shows stands in the row's other cells, too, so screen readers leave it out.

    Args:
        row: a wait or a call. The part of a call in which its answer came is of the full colour, with a mark at its
            beginning.
        colour: of a call.
        quarters: whether the quarters of the axis are marked.
    """
    grid = Markup("").join(_rect("rest", quarter * (WIDTH - 2) / 4, 0, 2, 20) for quarter in range(5) if quarters)
    bar = _rect(colour, row.bar.x, 4, row.bar.width, 12)
    if row.answer is not None:
        bar = Markup('<g class="silent">{}</g>').format(bar) + _rect(colour, row.answer.x, 4, row.answer.width, 12)
        bar += _rect("mark", row.answer.x, 0, 4, 20)
    return Markup(
        '<svg class="waterfall" viewBox="0 0 {} 20" preserveAspectRatio="none" aria-hidden="true">{}{}</svg>'
    ).format(WIDTH, grid, bar)


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of one moment."""

    at: datetime
    """Where they are drawn."""
    text: str
    span: tuple[datetime, datetime] | None
    """When the executions ended that they are of; None if there can be none."""


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
    marks = Markup("").join(
        Markup('<span><i class="{} {}"></i>{}</span>').format(one.colour, one.style, one.name) for one in series
    )
    head = Markup("").join(
        Markup('<th scope="col" class="right" data-colour="{}" data-style="{}" data-filters="{}">{}</th>').format(
            one.colour, one.style, urlencode(one.filters), one.name
        )
        for one in series
    )
    body = Markup("").join(
        Markup('<tr data-at="{}"><th scope="row">{}</th>{}</tr>').format(
            ms_from_time(row.at),
            _linked(row, executions),
            Markup("").join(_cell(one.values[at], unit) for one in series),
        )
        for at, row in enumerate(rows)
    )
    return Markup(
        '<figure class="chart" id="chart-{id}" data-unit="{unit}" data-start="{start}" data-end="{end}"{zooms}>'
        '<figcaption><h2>{label}</h2><span class="legend">{marks}</span></figcaption>'
        '<div class="plot"><canvas role="img" tabindex="0" aria-label="{label}: a chart. Its figures are in the table'
        ' below."></canvas></div><button type="button" class="quiet" data-log aria-pressed="false">Log scale</button>'
        '<details class="figures" open><summary>Figures</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures: {label}"><table>'
        '<thead><tr><th scope="col">UTC</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details></figure>'
    ).format(
        id=re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-"),
        unit=unit.name,
        start=start,
        end=end,
        zooms=Markup(" data-zooms") if zooms else "",
        label=label,
        marks=marks,
        head=head,
        body=body,
    )


def _linked(row: _Row, executions: Mapping[str, str]) -> Markup:
    """The time, with a link to the executions of then."""
    if row.span is None:
        return Markup("{}").format(row.text)
    return Markup('<a href="/executions?{}">{}</a>').format(urlencode({**executions, **between(*row.span)}), row.text)


def _cell(value: float | None, unit: Unit) -> Markup:
    if value is None:
        return Markup("<td></td>")
    return Markup('<td class="right" data-value="{:.12g}">{}</td>').format(value, unit.text(value))


def _rect(colour: str, x: float, y: float, width: float, height: float) -> Markup:
    of = colour, _n(x), _n(y), _n(width), _n(height)
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(*of)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _when(moment: datetime, step: timedelta) -> str:
    at = moment.astimezone(UTC)
    if step >= _DAY:
        return at.strftime("%b %d")
    return at.strftime("%b %d %H:%M:%S" if timedelta() < step < timedelta(minutes=1) else "%b %d %H:%M")
