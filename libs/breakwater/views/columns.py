"""Columns of a read model, declared once: terminals, pages and CSV files render them by their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar, cast

from breakwater.policy.formats import duration, money, percent

Row = TypeVar("Row")
Part = TypeVar("Part")

ColumnKind = Literal[
    "text", "id", "agent", "execution", "state", "words", "time", "ago", "number", "usd", "count", "duration", "percent"
]
"""`words` is a value of the wire contract, such as `dead_lettered`; `ago` is a time whose distance matters; `number`
identifies, and `count` counts."""

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


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table, or one line of the facts about a row.

    Attributes:
        title: as terminals show it; pages begin it with a capital.
        value: content of a CSV, and what rows are sorted by; None for a column that has neither.
        kind: how the value is written.
        words: what people see in place of the value.
        name: in URLs, and in the first line of a CSV; by default the title.
        missing: text for a value that is None.
        explained: tooltip of the heading on a page.
        order: sort key, if it is not the value.
        smallest_first: reverses the order of the first click on a heading, which puts the largest number on top.
        sortable: False if a page can't sort by it.
        right: alignment of a column that is not numeric.
        drop: on a narrow terminal, columns with the highest value are left out first; 0 stays.
        below: True for a long text. It comes last on a terminal; on a narrow one it gets a line of its own under the
            row, and is never left out.
        terminal: False for a column that terminals lack.
        page: False for a column that pages lack; their CSV has it.
    """

    title: str
    value: Callable[[Row], Value] | None
    kind: ColumnKind = "text"
    words: Callable[[Row], Cell] | None = None
    name: str = ""
    missing: str = ""
    explained: str = ""
    order: Callable[[Row], Any] | None = None
    smallest_first: bool = False
    sortable: bool = True
    right: bool = False
    drop: int = 0
    below: bool = False
    terminal: bool = True
    page: bool = True

    @property
    def key(self) -> str:
        """Its name, without spaces."""
        return self.name or self.title.replace(" ", "_")

    @property
    def heading(self) -> str:
        """Title on a page; `p95` stays as it is."""
        return self.title if self.title[1:2].isdigit() else self.title[:1].upper() + self.title[1:]

    @property
    def is_right(self) -> bool:
        """True if its cells are aligned to the right."""
        return self.right or self.kind in _NUMBERS

    @property
    def largest_first(self) -> bool:
        """True if the first click on its heading puts the largest value on top."""
        return self.kind in (*_NUMBERS, "time", "ago") and not self.smallest_first

    def shown(self, row: Row) -> Cell:
        """Text for people, with its tone: the words of the column, or its value as its kind is written."""
        of = self.words or self.value
        match None if of is None else of(row):
            case None:
                return self.missing or ("unknown" if self.kind == "usd" else "")
            case tuple() as toned:
                return toned
            case str() as text:
                return (text, tone_of(text)) if self.kind == "state" else text
            case datetime() as moment:
                return clock(moment)
            case number:
                return _number(self.kind, number)


def lifted(columns: Iterable[Column[Part]], part: Callable[[Row], Part]) -> list[Column[Row]]:
    """The columns of a part of a row as columns of the row."""

    def of(get: Callable[[Part], Any] | None) -> Callable[[Row], Any] | None:
        return None if get is None else lambda row: get(part(row))

    return [
        cast(Column[Row], replace(one, value=of(one.value), words=of(one.words), order=of(one.order)))
        for one in columns
    ]


def rough_duration(seconds: float) -> str:
    """A duration in its largest unit: `45 s`, `12 min`, `3 h`, `5 d`."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length * (2 if unit == "d" else 1):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ahead(moment: datetime) -> str:
    """The distance of a time to come: `in 3 h`."""
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
    """A time of day in the local time zone, with the date unless it is today's; empty for None."""
    if moment is None:
        return ""
    local, today = moment.astimezone(), (now or datetime.now(UTC)).astimezone().date()
    return local.strftime("%H:%M:%S" if local.date() == today else "%Y-%m-%d %H:%M:%S")


def tone_of(state: str) -> str:
    """Tone of a state's name; empty for one that is neither good nor bad."""
    return _TONES.get(state, "")


def with_words(columns: Iterable[Column[Row]], names: Iterable[str], words: Callable[[Row], Cell]) -> list[Column[Row]]:
    """The columns, of which those that are named show other words."""
    return [replace(one, words=words) if one.key in names else one for one in columns]


def humanized(word: str | None) -> str:
    """A value of the wire contract in plain English: `dead_lettered` as `dead lettered`; empty for None."""
    return "" if word is None else word.replace("_", " ")
