"""Tables of the pages: sorted and filtered as the URL says, and written as CSV.

A page makes a `PageTable` of its rows and hands it to its template. With `?csv=<id>` the table itself is the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from breakwater.contracts.types import format_time, usd_from_nano
from breakwater.policy.formats import csv_lines, no_formula

T = TypeVar("T")

Value = str | int | float | datetime | Sequence[str] | None

FEW = 5
"""Rows that nobody filters."""


@dataclass(frozen=True, slots=True)
class TableColumn(Generic[T]):
    """One column.

    Attributes:
        name: in the URL, and in the first line of the CSV.
        heading: on the page; one that begins with > is aligned to the right. Empty for a column of the CSV alone.
        value: what rows are sorted by, and what the CSV has; None for a column that has neither.
        usd: whether the values are nano-dollars.
        largest_first: whether the first click on the heading puts the largest on top.
        order: what rows are sorted by, if not the value.
        sortable: whether the page can sort by it.
    """

    name: str
    heading: str
    value: Callable[[T], Value] | None
    usd: bool = False
    largest_first: bool = False
    order: Callable[[T], Any] | None = None
    sortable: bool = True

    def key(self, row: T) -> Any:
        """What a row is sorted by; None if that is unknown."""
        of = self.order or self.value
        found = None if of is None else of(row)
        return found.casefold() if isinstance(found, str) else found

    def text(self, row: T) -> str:
        """The value in a CSV: amounts in dollars with nine places, times as RFC 3339; empty if it is unknown."""
        value = None if self.value is None else self.value(row)
        match value:
            case None:
                return ""
            case str():
                return no_formula(value)  # agents and models can write one
            case datetime():
                return format_time(value)
            case int() | float():
                return usd_from_nano(int(value)) if self.usd else str(value)
            case _:
                return no_formula(" ".join(value))


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's heading on the page."""

    text: str
    right: bool
    address: str | None
    """Sorts by it; None if nothing does."""
    sorted: str | None
    """`ascending` or `descending`, for screen readers; None if it is sorted by another one."""


@dataclass(frozen=True, slots=True)
class PageTable(Generic[T]):
    """A table as it is shown: those rows that its filter leaves, in its order."""

    id: str
    label: str
    columns: Sequence[TableColumn[T]]
    rows: Sequence[T]
    count: int
    """How many there are without the filter."""
    more: int
    """How many the filter leaves that are not shown."""
    headings: Sequence[Heading]
    find: str
    find_name: str
    """The parameter of the URL that filters."""
    kept: Mapping[str, str]
    """The rest of the URL's parameters."""
    csv_address: str
    cleared: str
    """The URL without the filter."""
    filterable: bool
    by: str
    """The heading of the column that it is sorted by; empty if it is sorted by none."""
    is_used: bool
    """Whether the URL says how it is sorted or filtered."""

    def csv(self) -> Response:
        """The rows as a file."""
        return csv_response(self.id, [csv_text(self.columns, self.rows, head=True)])


def table_of(
    request: Request,
    id: str,  # noqa: A002
    label: str,
    columns: Sequence[TableColumn[T]],
    rows: Iterable[T],
    *,
    sort: str = "",
    prefix: str | None = None,
    most: int | None = None,
    filterable: bool = True,
) -> PageTable[T]:
    """A table in the state that the URL says.

    Args:
        request: `?<id>.sort=` names a column, with a minus in front the other way round; `?<id>.find=` is a part of any
            value of a row, in any case.
        id: of the element on the page.
        label: its name, for screen readers.
        columns: its columns.
        rows: in the order that they have without `sort`.
        sort: the default of that parameter.
        prefix: of both parameters; `<id>.` by default.
        most: how many rows are shown; a CSV has all.
        filterable: whether the page shows a filter, where there are more than a few rows.
    """
    prefix = f"{id}." if prefix is None else prefix
    sort_name, find_name = f"{prefix}sort", f"{prefix}find"
    given = dict(request.query_params)
    wanted, find = given.get(sort_name, sort), given.get(find_name, "").strip()
    by_name = {column.name: column for column in columns if column.value and column.heading and column.sortable}
    chosen = by_name.get(wanted.removeprefix("-")) or by_name.get(sort.removeprefix("-"))
    backwards = wanted.startswith("-") and chosen is not None
    every = list(rows)
    found = [row for row in every if _has(columns, row, find.casefold())] if find else every
    ordered = found if chosen is None else _in_order(found, chosen, backwards=backwards)
    shown = ordered if "csv" in given else ordered[:most]
    others = {name: value for name, value in given.items() if name != "csv"}

    def address(**changed: str) -> str:
        query = {name: value for name, value in (others | changed).items() if value}
        return f"{request.url.path}?{urlencode(query)}#{id}"

    def heading(column: TableColumn[T]) -> Heading:
        is_sorted = chosen is column
        downwards = column.largest_first is not backwards
        return Heading(
            column.heading.removeprefix(">"),
            column.heading.startswith(">"),
            None
            if column.name not in by_name
            else address(**{sort_name: f"{'-' * (is_sorted and not backwards)}{column.name}"}),
            None if not is_sorted else "descending" if downwards else "ascending",
        )

    return PageTable(
        id,
        label,
        columns,
        shown,
        len(every),
        len(ordered) - len(shown),
        [heading(column) for column in columns if column.heading],
        find,
        find_name,
        {name: value for name, value in others.items() if name != find_name},
        f"{request.url.path}?{urlencode(others | {'csv': id})}",
        address(**{find_name: ""}),
        filterable and (len(every) > FEW or bool(find)),
        "" if chosen is None else chosen.heading.removeprefix(">"),
        sort_name in given or bool(find),
    )


def csv_text(columns: Sequence[TableColumn[T]], rows: Iterable[T], *, head: bool = False) -> str:
    """Rows as CSV, with the names of the columns above them if `head`."""
    shown = [column for column in columns if column.value is not None]
    names = [[f"{column.name}_usd" if column.usd else column.name for column in shown]] if head else []
    return csv_lines([*names, *([column.text(row) for column in shown] for row in rows)])


def csv_response(name: str, parts: Iterable[str]) -> Response:
    """A file that browsers save."""
    headers = {**csv_headers(name), "Cache-Control": "no-store"}
    return Response("".join(parts), headers=headers, media_type="text/csv")


def csv_headers(name: str) -> dict[str, str]:
    """That it is saved, and under which name."""
    return {"Content-Disposition": f'attachment; filename="{name}.csv"', "X-Content-Type-Options": "nosniff"}


def _in_order(rows: Sequence[T], column: TableColumn[T], *, backwards: bool) -> list[T]:
    """Sorted by a column; rows whose value is unknown come last either way, and equal ones stay in their order."""
    known = [row for row in rows if column.key(row) is not None]
    known.sort(key=column.key, reverse=column.largest_first is not backwards)
    return known + [row for row in rows if column.key(row) is None]


def _has(columns: Sequence[TableColumn[T]], row: T, text: str) -> bool:
    return any(text in column.text(row).casefold() for column in columns)
