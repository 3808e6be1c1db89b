"""All runs and executions: filtered, searched, and paged through, however many there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from breakwater.identity.pages.pages import HEADERS, Fetched, PageContext, fetched
from breakwater.identity.pages.visits import PartReader, ReadModels, Visit, shown, visit_of
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
"""Of runs or of executions."""

PAGE = 50
MOST_STEPS = 200
"""Rows that a run unfolds into."""
ID = "list"
SAVED_AT_ONCE = 1_000
MAX_SAVED = 200_000
"""Executions in a CSV; `breakwater executions export` has no limit."""

_FILTERS = ("agent", "status", "reason", "model", "tenant", "task_id", "plan_id", "run_id", "error_kind")
_NAMES = (*_FILTERS, "text", "min_cost")


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        visit = visit_of(context, request)
        if visit.get("csv") != ID:
            parts: dict[str, PartReader] = {"page": _page, "number": _number, "facets": _facets, "unfolded": _unfolded}
            return await shown(context, request, "executions.html", view, default_range=BY_DATA, **parts)
        asked = _asked(visit)
        if asked.wrong:
            return context.pages.plain(request, 400, "Nothing was saved", asked.wrong)
        begun = await fetched(search(context.analytics, asked.filters, limit=SAVED_AT_ONCE))
        if begun.value is None:
            return context.pages.plain(request, 503, "Nothing was saved", begun.problem or "")
        headers = {**HEADERS, **csv_headers("executions")}
        return StreamingResponse(_saved(context.analytics, asked, begun.value), headers=headers, media_type="text/csv")

    return [Route("/executions", show, methods=["GET"])]


@dataclass(frozen=True, slots=True)
class ExecutionsAsked:
    """The executions that an address asks for."""

    given: Mapping[str, str]
    """The filters that are not empty, as the form has them."""
    filters: Filters
    older: Cursor | None
    newer: Cursor | None
    size: SortColumn | None
    """The order; None for the latest first."""
    flat: bool
    """True for executions; False for their runs."""
    open: str
    """The run that is unfolded."""
    wrong: str
    """The reason why a filter can't be used, and why there is none then."""


def _asked(visit: Visit) -> ExecutionsAsked:
    given = {name: value for name in _NAMES if (value := visit.get(name))}
    window, before, after = visit.time_range.window, visit.get("before"), visit.get("after")
    wanted = visit.get("sort").removeprefix("-")
    size = next((one for one in get_args(SortColumn) if one == wanted), None)
    flat = bool(visit.get("flat"))
    unfolded = "" if flat else visit.get("open") or given.get("run_id", "")
    try:
        filters = filters_of(given, window)
        older = Cursor.parse(after) if after else None
        newer = Cursor.parse(before) if before and not after else None
    except ValueError as error:
        return ExecutionsAsked(given, filters_of({}, window), None, None, size, flat, unfolded, str(error))
    return ExecutionsAsked(given, filters, older, newer, size, flat, unfolded, "")


def _is_slow(visit: Visit, asked: ExecutionsAsked) -> bool:
    # Words are looked for in long texts, and sorting reads all that match.
    return asked.filters.text is not None or (asked.size is not None and visit.time_range.is_long)


async def _page(visit: Visit, models: ReadModels) -> Fetched[_Page]:
    asked = _asked(visit)
    return await visit.part(_found(models.analytics, visit, asked), slow=_is_slow(visit, asked))


async def _found(database: Analytics, visit: Visit, asked: ExecutionsAsked) -> _Page:
    if asked.size is not None:
        smallest = visit.get("sort").startswith("-")
        ordered: Any = largest if asked.flat else largest_runs
        return Page(await ordered(database, asked.filters, asked.size, smallest=smallest, limit=PAGE))
    matching = search if asked.flat else search_runs
    return await matching(database, asked.filters, after=asked.older, before=asked.newer, limit=PAGE)


async def _unfolded(visit: Visit, models: ReadModels) -> Fetched[list[Step]]:
    run_id = _asked(visit).open
    found = await fetched(steps(models.analytics, run_id)) if run_id else Fetched(())
    return Fetched(as_tree(found.value or ()), found.problem)


def _number(visit: Visit, models: ReadModels) -> Awaitable[Fetched[int]]:
    asked = _asked(visit)
    return visit.part(count(models.analytics, asked.filters), slow=_is_slow(visit, asked))


def _facets(visit: Visit, models: ReadModels) -> Awaitable[Fetched[Facets]]:
    slow = _is_slow(visit, _asked(visit)) or visit.time_range.is_long
    return visit.part(facets(models.analytics, visit.time_range.window), slow=slow)


def view(visit: Visit, page: Fetched[_Page], **_: object) -> dict[str, Any]:
    """A page of runs or executions, with the form of their filters."""
    asked, time_range = _asked(visit), visit.time_range
    lines: Sequence[Any] = page.value.lines if page.value else ()
    kept = {"flat": "1"} if asked.flat else {}
    columns: Any = COLUMNS if asked.flat else RUNS

    def link(**others: str) -> str:
        return f"/executions?{urlencode({**asked.given, **time_range.query, **kept, **others})}"

    return {
        "given": asked.given,
        "wrong": asked.wrong,
        "table": PageTable(visit.address, ID, "Executions", columns, lines, prefix="", filterable=False),
        "kept": kept,
        "open": asked.open,
        "steps": STEPS,
        "most_steps": MOST_STEPS,
        "forms": [("Runs", link(flat=""), not asked.flat), ("Executions", link(flat="1"), asked.flat)],
        "sort": visit.get("sort") if asked.size else "",
        "statuses": [(status, None) for status in get_args(Status)],
        "newer": link(before=page.value.newer.text) if page.value and page.value.newer else None,
        "older": link(after=page.value.older.text) if page.value and page.value.older else None,
        "first": not (visit.get("before") or visit.get("after") or asked.size),
        "newest": link(),
    }


async def _saved(analytics: Analytics, asked: ExecutionsAsked, first: Page[ExecutionSummary]) -> AsyncGenerator[str]:
    """All that match as a file, the newest first; it breaks off if ClickHouse does."""
    page, saved = first, 0
    yield csv_text(COLUMNS, ())
    while page.lines:
        yield csv_text(COLUMNS, page.lines, head=False)
        saved += len(page.lines)
        if page.older is None or saved >= MAX_SAVED:
            return
        page = await search(analytics, asked.filters, after=page.older, limit=SAVED_AT_ONCE)


def filters_of(given: Mapping[str, str], window: TimeWindow) -> Filters:
    """The filters of a form.

    Args:
        given: the fields that are not empty, by name; `min_cost` in dollars.
        window: when the executions ended.

    Raises:
        ValueError: a field is invalid; the text says which and why.
    """
    others: dict[str, Any] = {name: value for name, value in given.items() if name != "min_cost"}
    min_cost = _nano(given["min_cost"]) if "min_cost" in given else None
    return Filters(**others, min_cost=min_cost, since=window.start, until=window.end)


def _nano(dollars: str) -> int:
    try:
        nano = Decimal(dollars.lstrip("$")) * NANO_PER_USD
    except InvalidOperation:
        nano = Decimal("NaN")
    if not nano.is_finite() or not 0 <= nano < 10**18:
        raise ValueError(f"minimum cost: {dollars!r} is not an amount in dollars such as 0.05")
    return int(nano)
