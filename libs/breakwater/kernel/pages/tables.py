"""The tables of pages, which URLs sort and filter, and which can be saved as CSV.

A page passes its rows to its template as a `PageTable`. With `?csv=<id>` the response is the table itself, as CSV.
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

MAX_UNFILTERED = 5
"""Maximum number of rows of a table without a filter."""


@dataclass(frozen=True, slots=True)
class TableUrl:
    """The URL of a page: its path and the parameters of its query."""

    path: str
    query: Mapping[str, str]

    def link(self, fragment: str = "", **changed: str) -> str:
        """The URL of the same page with changed parameters; empty ones are omitted."""
        query = {name: value for name, value in {**self.query, **changed}.items() if value and name != "csv"}
        return f"{self.path}?{urlencode(query)}{fragment and f'#{fragment}'}"


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a column on a page."""

    column: Column[Any]
    link: str | None
    """The URL that sorts by the column; None if the column is not sortable."""
    sorted: str | None
    """`ascending` or `descending`, for screen readers; None if the table is sorted by another column."""


@dataclass(frozen=True)
class PageTable(Generic[Row]):
    """A table, sorted and filtered by the URL of its page.

    Attributes:
        address: URL of the page. `?<id>.sort=` names a column, with a minus for the reverse order; `?<id>.find=` is a
            text that a value of each shown row contains, in upper or lower case.
        id: id of the element on the page.
        label: name of the table for screen readers.
        columns: the columns.
        all_rows: all rows, in the order that they have without `sort`.
        sort: default of the parameter `sort`.
        prefix: prefix of both parameters; by default `<id>.`.
        max_rows: maximum number of rows that the page shows; a CSV has all.
        filterable: False for a table without a filter.
        filters: parameters of the page that the form of the filter sets or removes.
        find_name: name of the parameter for the filter's text, if several tables share it.
    """

    address: TableUrl
    id: str
    label: str
    columns: Sequence[Column[Row]]
    all_rows: Sequence[Row]
    sort: str = ""
    prefix: str | None = None
    max_rows: int | None = None
    filterable: bool = True
    filters: Sequence[str] = ()
    find_name: str = ""

    @property
    def shown_columns(self) -> list[Column[Row]]:
        """The columns on the page."""
        return [column for column in self.columns if column.page]

    @property
    def count(self) -> int:
        """The number of rows without the filter."""
        return len(self.all_rows)

    @property
    def rows(self) -> Sequence[Row]:
        """The rows on the page."""
        return self.ordered[: self.max_rows]

    @property
    def more(self) -> int:
        """The number of matching rows that the page does not show."""
        return len(self.ordered) - len(self.rows)

    @property
    def find_parameter(self) -> str:
        """The name of the URL's parameter that filters the rows."""
        return self.find_name or self.parameter("find")

    @property
    def find(self) -> str:
        """The text that shown rows contain; empty without a filter."""
        return self.address.query.get(self.find_parameter, "").strip()

    @property
    def is_filtered(self) -> bool:
        """Returns True if the URL filters the table, or the data of the table."""
        return any(self.address.query.get(name) for name in (self.find_parameter, *self.filters))

    @property
    def has_filter(self) -> bool:
        """Returns True if the page shows a filter."""
        return self.filterable and (self.count > MAX_UNFILTERED or bool(self.find or self.filters))

    @property
    def is_used(self) -> bool:
        """Returns True if the URL sorts or filters the table."""
        return self.parameter("sort") in self.address.query or bool(self.find)

    @property
    def other_parameters(self) -> dict[str, str]:
        """The URL's other parameters, which the form of the filter keeps."""
        replaced = {self.find_parameter, *self.filters}
        return {name: value for name, value in self.address.query.items() if name not in replaced}

    @property
    def csv_link(self) -> str:
        """The URL that saves the table as a CSV."""
        return f"{self.address.path}?{urlencode({**self.address.query, 'csv': self.id})}"

    @property
    def cleared_link(self) -> str:
        """The URL of the page without the filter."""
        return self.address.link(self.id, **dict.fromkeys((self.find_parameter, *self.filters), ""))

    @property
    def sort_column(self) -> Column[Row] | None:
        """The column that the table is sorted by; None if the rows keep their order."""
        by_name = {column.key: column for column in self.shown_columns if column.value and column.sortable}
        return by_name.get(self._sort_parameter.removeprefix("-")) or by_name.get(self.sort.removeprefix("-"))

    @cached_property
    def ordered(self) -> list[Row]:
        """All matching rows, sorted. Unknown values are last in both orders, and equal ones keep their order."""
        text = self.find.casefold()
        matching = [row for row in self.all_rows if not text or self._contains(row, text)]
        sort_column = self.sort_column
        if sort_column is None:
            return matching
        with_value = [row for row in matching if _sort_key(sort_column, row) is not None]
        descending = sort_column.largest_first is not self._is_reversed
        with_value.sort(key=lambda row: _sort_key(sort_column, row), reverse=descending)
        return with_value + [row for row in matching if _sort_key(sort_column, row) is None]

    @property
    def headings(self) -> list[Heading]:
        """The headings, with links that sort."""
        sort_column = self.sort_column
        is_reversed = self._is_reversed
        headings: list[Heading] = []
        for column in self.shown_columns:
            is_sorted = column is sort_column
            sign = "-" if is_sorted and not is_reversed else ""
            link = self.address.link(self.id, **{self.parameter("sort"): sign + column.key})
            direction = "descending" if column.largest_first is not is_reversed else "ascending"
            is_sortable = column.value is not None and column.sortable
            headings.append(Heading(column, link if is_sortable else None, direction if is_sorted else None))
        return headings

    def parameter(self, name: str) -> str:
        """The full name of the URL's parameter `sort` or `find`."""
        return f"{self.id}.{name}" if self.prefix is None else f"{self.prefix}{name}"

    def _contains(self, row: Row, text: str) -> bool:
        return any(text in csv_cell(column, row).casefold() for column in self.columns)

    @property
    def _sort_parameter(self) -> str:
        return self.address.query.get(self.parameter("sort"), self.sort)

    @property
    def _is_reversed(self) -> bool:
        return self._sort_parameter.startswith("-") and self.sort_column is not None


def csv_text(columns: Sequence[Column[Row]], rows: Iterable[Row], *, head: bool = True) -> str:
    """Writes rows as CSV, with a line of the columns' names if `head`."""
    saved_columns = [column for column in columns if column.value is not None]
    names = [[f"{column.key}_usd" if column.kind == "usd" else column.key for column in saved_columns]] if head else []
    return csv_lines([*names, *([csv_cell(column, row) for column in saved_columns] for row in rows)])


def csv_cell(column: Column[Row], row: Row) -> str:
    """Writes a value for a CSV: amounts in dollars with nine places, times as RFC 3339; empty if it is unknown."""
    value = None if column.value is None else column.value(row)
    if value is None:
        return ""
    if isinstance(value, str):
        return no_formula(value)  # the text may be of an agent or a model
    if isinstance(value, tuple):
        return no_formula(value[0])
    if isinstance(value, datetime):
        return format_time(value)
    return usd_from_nano(int(value)) if column.kind == "usd" else str(value)


def csv_headers(name: str) -> dict[str, str]:
    """The headers of a CSV that browsers save under a name."""
    return {
        "Content-Disposition": f'attachment; filename="{name}.csv"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _sort_key(column: Column[Row], row: Row) -> Any:
    """The sort key of a row; None if it is unknown."""
    get_key = column.order or column.value
    value = None if get_key is None else get_key(row)
    return value.casefold() if isinstance(value, str) else value
