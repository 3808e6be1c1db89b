"""The page of all runs and executions, with filters, search and paging."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from breakwater.identity.pages.rendering import HEADERS, NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import PartReader, ReadModels, Visit, render_page, visit_of
from breakwater.jobs.contract.execution import ExecutionSummary, Status
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.pages.tables import PageTable, csv_headers, csv_text
from breakwater.kernel.pages.time_range import BY_DATA
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import NANO_PER_USD
from breakwater.records.search import (
    Cursor,
    Facets,
    Filters,
    Page,
    SortColumn,
    count,
    facets,
    largest,
    largest_runs,
    search,
    search_runs,
    steps,
)
from breakwater.records.views.executions import COLUMNS, RUNS, STEPS, Step, as_tree

_Page = Page[Any]
"""A page of runs or executions."""

PAGE_ROWS = 50
MAX_STEPS = 200
"""Maximum number of rows that a run unfolds into."""
ID = "list"
SAVED_ROWS_PER_QUERY = 1_000
MAX_SAVED = 200_000
"""Maximum number of executions in a CSV; `breakwater executions export` has no limit."""

_FILTERS = (
    "agent",
    "status",
    "reason",
    "model",
    "tenant",
    "user",
    "team",
    "task_id",
    "plan_id",
    "run_id",
    "error_kind",
)
_NAMES = (*_FILTERS, "text", "min_cost")

LINK = NavigationLink("/executions", "Executions", "e")


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        visit = visit_of(context, request)
        if visit.get("csv") != ID:
            parts: dict[str, PartReader] = {
                "page": _page,
                "number": _number,
                "facets": _facets,
                "run_steps": _run_steps,
            }
            return await render_page(context, request, "executions.html", view, default_range=BY_DATA, **parts)
        selection = _selection(visit)
        if selection.problem:
            return context.pages.plain(request, 400, "Nothing was saved", selection.problem)
        first_page = await fetch_part(search(context.analytics, selection.filters, limit=SAVED_ROWS_PER_QUERY))
        if first_page.value is None:
            return context.pages.plain(request, 503, "Nothing was saved", first_page.problem or "")
        headers = {**HEADERS, **csv_headers("executions")}
        return StreamingResponse(
            _csv(context.analytics, selection, first_page.value), headers=headers, media_type="text/csv"
        )

    return [Route("/executions", show, methods=["GET"])]


@dataclass(frozen=True, slots=True)
class ExecutionsSelection:
    """The executions that a URL selects."""

    form_values: Mapping[str, str]
    """The filters that are not empty, as the form has them."""
    filters: Filters
    older: Cursor | None
    newer: Cursor | None
    sort_column: SortColumn | None
    """The sort order; None for the latest first."""
    flat: bool
    """True for executions; False for their runs."""
    open_run: str
    """The id of the unfolded run; empty if none is."""
    problem: str
    """The reason why a filter is invalid, so that none applies; empty if all are valid."""


def _selection(visit: Visit) -> ExecutionsSelection:
    form_values = {name: value for name in _NAMES if (value := visit.get(name))}
    window = visit.time_range.window
    before = visit.get("before")
    after = visit.get("after")
    sort_name = visit.get("sort").removeprefix("-")
    sort_column = next((column for column in get_args(SortColumn) if column == sort_name), None)
    flat = bool(visit.get("flat"))
    open_run = "" if flat else visit.get("open") or form_values.get("run_id", "")
    try:
        filters = filters_of(form_values, window)
        older = Cursor.parse(after) if after else None
        newer = Cursor.parse(before) if before and not after else None
    except ValueError as error:
        no_filters = filters_of({}, window)
        return ExecutionsSelection(form_values, no_filters, None, None, sort_column, flat, open_run, str(error))
    return ExecutionsSelection(form_values, filters, older, newer, sort_column, flat, open_run, "")


def _is_slow(visit: Visit, selection: ExecutionsSelection) -> bool:
    # A search for words reads long texts, and sorting reads all matching rows.
    return selection.filters.text is not None or (selection.sort_column is not None and visit.time_range.is_long)


async def _page(visit: Visit, models: ReadModels) -> PagePart[_Page]:
    selection = _selection(visit)
    return await visit.part(_read_page(models.analytics, visit, selection), slow=_is_slow(visit, selection))


async def _read_page(analytics: Analytics, visit: Visit, selection: ExecutionsSelection) -> _Page:
    filters = selection.filters
    if selection.sort_column is not None:
        smallest = visit.get("sort").startswith("-")
        search_sorted: Any = largest if selection.flat else largest_runs
        return Page(await search_sorted(analytics, filters, selection.sort_column, smallest=smallest, limit=PAGE_ROWS))
    search_latest = search if selection.flat else search_runs
    return await search_latest(analytics, filters, after=selection.older, before=selection.newer, limit=PAGE_ROWS)


async def _run_steps(visit: Visit, models: ReadModels) -> PagePart[list[Step]]:
    run_id = _selection(visit).open_run
    run_steps = await fetch_part(steps(models.analytics, run_id)) if run_id else PagePart(())
    return PagePart(as_tree(run_steps.value or ()), run_steps.problem)


def _number(visit: Visit, models: ReadModels) -> Awaitable[PagePart[int]]:
    selection = _selection(visit)
    return visit.part(count(models.analytics, selection.filters), slow=_is_slow(visit, selection))


def _facets(visit: Visit, models: ReadModels) -> Awaitable[PagePart[Facets]]:
    slow = _is_slow(visit, _selection(visit)) or visit.time_range.is_long
    return visit.part(facets(models.analytics, visit.time_range.window), slow=slow)


def view(visit: Visit, page: PagePart[_Page], **_: object) -> dict[str, Any]:
    """The values of the page: runs or executions, and the form of their filters."""
    selection = _selection(visit)
    time_range = visit.time_range
    lines: Sequence[Any] = page.value.lines if page.value else ()
    kept_parameters = {"flat": "1"} if selection.flat else {}
    columns: Any = COLUMNS if selection.flat else RUNS

    def link(**changed: str) -> str:
        return f"/executions?{urlencode({**selection.form_values, **time_range.query, **kept_parameters, **changed})}"

    return {
        "form_values": selection.form_values,
        "filter_problem": selection.problem,
        "table": PageTable(visit.address, ID, "Executions", columns, lines, prefix="", filterable=False),
        "kept_parameters": kept_parameters,
        "open_run": selection.open_run,
        "steps": STEPS,
        "max_steps": MAX_STEPS,
        "forms": [("Runs", link(flat=""), not selection.flat), ("Executions", link(flat="1"), selection.flat)],
        "sort": visit.get("sort") if selection.sort_column else "",
        "statuses": [(status, None) for status in get_args(Status)],
        "newer": link(before=page.value.newer.text) if page.value and page.value.newer else None,
        "older": link(after=page.value.older.text) if page.value and page.value.older else None,
        "is_first_page": not (visit.get("before") or visit.get("after") or selection.sort_column),
        "newest": link(),
    }


async def _csv(
    analytics: Analytics, selection: ExecutionsSelection, first_page: Page[ExecutionSummary]
) -> AsyncGenerator[str]:
    """Yields a CSV of all matching executions, the newest first. It breaks off if ClickHouse does."""
    page = first_page
    saved_rows = 0
    yield csv_text(COLUMNS, ())
    while page.lines:
        yield csv_text(COLUMNS, page.lines, head=False)
        saved_rows += len(page.lines)
        if page.older is None or saved_rows >= MAX_SAVED:
            return
        page = await search(analytics, selection.filters, after=page.older, limit=SAVED_ROWS_PER_QUERY)


def filters_of(form_values: Mapping[str, str], window: TimeWindow) -> Filters:
    """Parses the filters of a form.

    Args:
        form_values: the fields that are not empty, by name; `min_cost` is in dollars.
        window: the time in which the executions ended.

    Raises:
        ValueError: if a field is invalid; the message says which and why.
    """
    text_filters: dict[str, Any] = {name: value for name, value in form_values.items() if name != "min_cost"}
    min_cost = _nano(form_values["min_cost"]) if "min_cost" in form_values else None
    return Filters(**text_filters, min_cost=min_cost, since=window.start, until=window.end)


def _nano(dollars: str) -> int:
    try:
        nano = Decimal(dollars.lstrip("$")) * NANO_PER_USD
    except InvalidOperation:
        nano = Decimal("NaN")
    if not nano.is_finite() or not 0 <= nano < 10**18:
        raise ValueError(f"minimum cost: {dollars!r} is not an amount in dollars such as 0.05")
    return int(nano)
