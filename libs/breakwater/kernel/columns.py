"""Columns of a read model, declared once: terminals, pages and CSV files render them by kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar, cast

from breakwater.kernel.formats import duration, money, percent

Row = TypeVar("Row")
Part = TypeVar("Part")

ColumnKind = Literal[
    "text", "id", "agent", "execution", "state", "words", "time", "ago", "number", "usd", "count", "duration", "percent"
]
"""The ways to write a value. `words` is a value of the wire contract, such as `dead_lettered`; `ago` is a time whose
distance matters; a `number` identifies, a `count` counts."""

Cell = str | tuple[str, str]
"""Text, or text and its tone: `good`, `warn`, `bad`, `faint`, or a style that terminals know, such as `bold`."""

Value = Cell | int | float | datetime | None

_NUMBERS = ("number", "usd", "count", "duration", "percent")
_STATES = {
    "good": "ok closed success succeeded healthy resolved done",
    "warn": "warn half_open retried waiting soft_cap warning degraded acknowledged partial refused begun "
    "short_circuited cancelled",
    "bad": "error fail failed open firing isolated dead_lettered hard_cap critical pending unhealthy worker_lost",
    "faint": "unknown",
}
_TONES = {state: tone for tone, states in _STATES.items() for state in states.split()}


def short_id(name: str) -> str:
    """Returns an id as it is shown where there is little room: its beginning and its end, if it is long."""
    return name if len(name) <= 16 else f"{name[:8]}…{name[-6:]}"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table, or a line in a list of facts about one row.

    Attributes:
        title: heading on a terminal; pages capitalise it.
        value: returns the value that a CSV contains and rows are sorted by; None for a column without one.
        kind: how the value is written.
        display: returns what people see instead of the value.
        name: name in URLs and in the first line of a CSV; by default the title.
        missing: text for a value that is None.
        tooltip: tooltip of the heading on a page.
        order: returns the sort key, if it is not the value.
        smallest_first: True if the first click on the heading puts the smallest value on top, not the largest.
        sortable: False if a page can't sort by the column.
        align_right: True for a column that is aligned to the right although it is not numeric.
        drop: a narrow terminal omits columns with the highest number first; it never omits 0.
        below: True for a long text, which comes last on a terminal. A narrow terminal gives it a line of its own below
            the row, and never omits it.
        shortens: True for an id, of which a narrow terminal shows the beginning and the end, before it omits columns.
        terminal: False if terminals omit the column.
        page: False if pages omit the column; their CSV has it.
    """

    title: str
    value: Callable[[Row], Value] | None
    kind: ColumnKind = "text"
    display: Callable[[Row], Cell] | None = None
    name: str = ""
    missing: str = ""
    tooltip: str = ""
    order: Callable[[Row], Any] | None = None
    smallest_first: bool = False
    sortable: bool = True
    align_right: bool = False
    drop: int = 0
    below: bool = False
    shortens: bool = False
    terminal: bool = True
    page: bool = True

    @property
    def key(self) -> str:
        """The column's name, without spaces."""
        return self.name or self.title.replace(" ", "_")

    @property
    def heading(self) -> str:
        """The title on a page, capitalised unless it is one such as `p95`."""
        return self.title if self.title[1:2].isdigit() else self.title[:1].upper() + self.title[1:]

    @property
    def is_right_aligned(self) -> bool:
        """Returns True if the cells are aligned to the right."""
        return self.align_right or self.kind in _NUMBERS

    @property
    def largest_first(self) -> bool:
        """Returns True if the first click on the heading puts the largest value on top."""
        return self.kind in (*_NUMBERS, "time", "ago") and not self.smallest_first

    def cell(self, row: Row) -> Cell:
        """Renders the column's cell of a row: by `display` if there is one, otherwise its value by kind."""
        render = self.display or self.value
        value = None if render is None else render(row)
        if value is None:
            return self.missing or ("unknown" if self.kind == "usd" else "")
        if isinstance(value, tuple):
            return value
        if isinstance(value, str):
            return (value, tone_of(value)) if self.kind == "state" else value
        if isinstance(value, datetime):
            return clock(value)
        return _number(self.kind, value)


def columns_of_part(columns: Iterable[Column[Part]], part: Callable[[Row], Part]) -> list[Column[Row]]:
    """Turns columns of a part of a row into columns of the row. `part` returns that part."""

    def for_row(get: Callable[[Part], Any] | None) -> Callable[[Row], Any] | None:
        return None if get is None else lambda row: get(part(row))

    def lift(column: Column[Part]) -> Column[Row]:
        value = for_row(column.value)
        return cast(
            Column[Row], replace(column, value=value, display=for_row(column.display), order=for_row(column.order))
        )

    return [lift(column) for column in columns]


def rough_duration(seconds: float) -> str:
    """Rounds a duration to its largest unit: `45 s`, `12 min`, `3 h`, `5 d`."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length * (2 if unit == "d" else 1):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def elapsed(seconds: float) -> str:
    """Writes a duration that goes on, with two units: `45 s`, `12 min 05 s`, `3 h 12 min`, `2 d 3 h`."""
    whole_s = max(0, int(seconds))
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3_600:
        return f"{whole_s // 60} min {whole_s % 60:02} s"
    hours = whole_s // 3_600
    return f"{hours} h {whole_s // 60 % 60:02} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def time_until(moment: datetime) -> str:
    """Says how far a future time is away: `in 3 h`; for a past one `in 0 s`."""
    return f"in {rough_duration(max(0.0, (moment - datetime.now(UTC)).total_seconds()))}"


def _number(kind: ColumnKind, number: float) -> str:
    match kind:
        case "usd":
            return money(int(number))
        case "duration":
            return duration(number)
        case "percent":
            return percent(number)
        case "count":
            return f"{number:,}"
        case _:
            return str(number)


def clock(moment: datetime | None, now: datetime | None = None) -> str:
    """Writes a time in the local time zone, with the date unless it is today's; empty for None."""
    if moment is None:
        return ""
    local = moment.astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return local.strftime("%H:%M:%S" if local.date() == today else "%Y-%m-%d %H:%M:%S")


def tone_of(state: str) -> str:
    """The tone of a state's name; empty for a state that is neither good nor bad."""
    return _TONES.get(state, "")


def with_display(
    columns: Iterable[Column[Row]], names: Collection[str], display: Callable[[Row], Cell]
) -> list[Column[Row]]:
    """Replaces what people see in the named columns."""
    return [replace(column, display=display) if column.key in names else column for column in columns]


def humanize(word: str | None) -> str:
    """Writes a value of the wire contract in plain English: `dead_lettered` as `dead lettered`; empty for None."""
    return "" if word is None else word.replace("_", " ")
