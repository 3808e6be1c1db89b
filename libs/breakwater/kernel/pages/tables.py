"""Tables of the pages: sorted and filtered as the URL says, and written as CSV.

A page makes a `PageTable` of its rows and hands it to its template. With `?csv=<id>` the table itself is the response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from breakwater.kernel.columns import Column
from breakwater.kernel.formats import csv_lines, no_formula
from breakwater.kernel.types import format_time, usd_from_nano

Row = TypeVar("Row")

FEW = 5
"""A table of this many rows has no filter."""


@dataclass(frozen=True, slots=True)
class TableUrl:
    """The address of a page: its path and the parameters of its query."""

    path: str
    query: Mapping[str, str]

    def link(self, fragment: str = "", **changed: str) -> str:
        """The same page with other parameters; empty ones are left out."""
        query = {name: value for name, value in {**self.query, **changed}.items() if value and name != "csv"}
        return f"{self.path}?{urlencode(query)}{fragment and f'#{fragment}'}"


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's heading on the page."""

    column: Column[Any]
    link: str | None
    """Sorts by the column; None if nothing does."""
    sorted: str | None
    """`ascending` or `descending`, for screen readers; None if the table is sorted by another one."""


@dataclass(frozen=True)
class PageTable(Generic[Row]):
    """A table in the state that the address of its page says.

    Attributes:
        address: `?<id>.sort=` names a column, with a minus in front the other way round; `?<id>.find=` is a part of any
            value of a row, in any case.
        id: of the element on the page.
        label: its name, for screen readers.
        columns: its columns.
        every: its rows, in the order that they have without `sort`.
        sort: the default of that parameter.
        prefix: of both parameters; `<id>.` by default.
        most: number of rows that are shown; a CSV has all.
        filterable: False for a table without a filter.
        filters: parameters of the page that the form of the filter has fields for, or that it drops.
        find_name: the parameter of the filter's text, where several tables have one; otherwise it is the table's own.
    """

    address: TableUrl
    id: str
    label: str
    columns: Sequence[Column[Row]]
    every: Sequence[Row]
    sort: str = ""
    prefix: str | None = None
    most: int | None = None
    filterable: bool = True
    filters: Sequence[str] = ()
    find_name: str = ""

    @property
    def shown_columns(self) -> list[Column[Row]]:
        """Columns on the page."""
        return [column for column in self.columns if column.page]

    @property
    def count(self) -> int:
        """Number of rows without the filter."""
        return len(self.every)

    @property
    def rows(self) -> Sequence[Row]:
        """Rows on the page."""
        return self.ordered[: self.most]

    @property
    def more(self) -> int:
        """Number of rows that the filter leaves and that are not shown."""
        return len(self.ordered) - len(self.rows)

    @property
    def find_parameter(self) -> str:
        """Name of the address's parameter that filters the rows."""
        return self.find_name or self.parameter("find")

    @property
    def find(self) -> str:
        """Text that every row has; empty without a filter."""
        return self.address.query.get(self.find_parameter, "").strip()

    @property
    def is_filtered(self) -> bool:
        """True if the address filters the table, or what the table is made of."""
        return any(self.address.query.get(name) for name in (self.find_parameter, *self.filters))

    @property
    def has_filter(self) -> bool:
        """True if the page shows a filter."""
        return self.filterable and (self.count > FEW or bool(self.find or self.filters))

    @property
    def is_used(self) -> bool:
        """True if the address sorts or filters the table."""
        return self.parameter("sort") in self.address.query or bool(self.find)

    @property
    def kept(self) -> dict[str, str]:
        """The rest of the address's parameters, for the form of the filter."""
        asked = {self.find_parameter, *self.filters}
        return {name: value for name, value in self.address.query.items() if name not in asked}

    @property
    def csv_link(self) -> str:
        """Saves the table as a CSV."""
        return f"{self.address.path}?{urlencode({**self.address.query, 'csv': self.id})}"

    @property
    def cleared_link(self) -> str:
        """The page without the filter."""
        return self.address.link(self.id, **dict.fromkeys((self.find_parameter, *self.filters), ""))

    @property
    def by(self) -> Column[Row] | None:
        """The column that the table is sorted by."""
        by_name = {column.key: column for column in self.shown_columns if column.value and column.sortable}
        return by_name.get(self._wanted.removeprefix("-")) or by_name.get(self.sort.removeprefix("-"))

    @cached_property
    def ordered(self) -> list[Row]:
        """All rows that the filter leaves, sorted; unknown values come last either way, equal ones keep their order."""
        text, by = self.find.casefold(), self.by
        found = [
            row for row in self.every if not text or any(text in csv_cell(one, row).casefold() for one in self.columns)
        ]
        if by is None:
            return found
        known = [row for row in found if _sort_key(by, row) is not None]
        known.sort(key=lambda row: _sort_key(by, row), reverse=by.largest_first is not self._is_backwards)
        return known + [row for row in found if _sort_key(by, row) is None]

    @property
    def headings(self) -> list[Heading]:
        """The headings, with links that sort."""
        by, backwards = self.by, self._is_backwards
        headings: list[Heading] = []
        for column in self.shown_columns:
            sign = "-" if column is by and not backwards else ""
            link = self.address.link(self.id, **{self.parameter("sort"): sign + column.key})
            direction = "descending" if column.largest_first is not backwards else "ascending"
            is_sortable = column.value is not None and column.sortable
            headings.append(Heading(column, link if is_sortable else None, direction if column is by else None))
        return headings

    def parameter(self, name: str) -> str:
        """Name of the address's parameter `sort` or `find`."""
        return f"{self.id}.{name}" if self.prefix is None else f"{self.prefix}{name}"

    @property
    def _wanted(self) -> str:
        return self.address.query.get(self.parameter("sort"), self.sort)

    @property
    def _is_backwards(self) -> bool:
        return self._wanted.startswith("-") and self.by is not None


def csv_text(columns: Sequence[Column[Row]], rows: Iterable[Row], *, head: bool = True) -> str:
    """Rows as CSV, with the names of the columns above them if `head`."""
    shown = [column for column in columns if column.value is not None]
    names = [[f"{column.key}_usd" if column.kind == "usd" else column.key for column in shown]] if head else []
    return csv_lines([*names, *([csv_cell(column, row) for column in shown] for row in rows)])


def csv_cell(column: Column[Row], row: Row) -> str:
    """A value in a CSV: amounts in dollars with nine places, times as RFC 3339; empty if it is unknown."""
    match None if column.value is None else column.value(row):
        case None:
            return ""
        case str() as text:
            return no_formula(text)  # agents and models can write one
        case tuple() as toned:
            return no_formula(toned[0])
        case datetime() as moment:
            return format_time(moment)
        case number:
            return usd_from_nano(int(number)) if column.kind == "usd" else str(number)


def csv_headers(name: str) -> dict[str, str]:
    """Headers of a file that browsers save under a name."""
    return {
        "Content-Disposition": f'attachment; filename="{name}.csv"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _sort_key(column: Column[Row], row: Row) -> Any:
    """Sort key of a row; None if it is unknown."""
    of = column.order or column.value
    found = None if of is None else of(row)
    return found.casefold() if isinstance(found, str) else found
