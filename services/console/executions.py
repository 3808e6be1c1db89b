"""All executions: filtered, searched, and paged through, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from breakwater.analytics.search import (
    Cursor,
    Filters,
    Page,
    SortColumn,
    count,
    facets,
    largest,
    search,
)
from breakwater.analytics.window import TimeWindow
from breakwater.contracts.execution import ExecutionSummary, Status
from breakwater.contracts.types import NANO_PER_USD
from services.console.pages import HEADERS, PageContext, fetched, follows, pending
from services.console.tables import TableColumn, csv_headers, csv_text, table_of
from services.console.time_range import time_range_of

PAGE = 50
ID = "list"
SAVED_AT_ONCE = 1_000
MAX_SAVED = 200_000
"""Executions in a CSV; `breakwater executions export` has no limit."""

_NAMES = ("agent", "status", "reason", "model", "tenant", "task_id", "plan_id", "error_kind", "text", "min_cost")


COLUMNS: tuple[TableColumn[ExecutionSummary], ...] = (
    TableColumn("ended", "Ended", lambda line: line.completed_at, sortable=False),
    TableColumn("status", "Status", lambda line: line.status, sortable=False),
    TableColumn("id", "Id", lambda line: line.execution_id, sortable=False),
    TableColumn("agent", "Agent", lambda line: line.agent, sortable=False),
    TableColumn("model", "Model", lambda line: line.model, sortable=False),
    TableColumn("tenant", "", lambda line: line.tenant),
    TableColumn("task", "", lambda line: line.task_id),
    TableColumn("plan", "", lambda line: line.plan_id),
    TableColumn("attempts_count", ">Attempts", lambda line: line.attempts_count, largest_first=True),
    TableColumn("total_tokens", ">Tokens", lambda line: line.total_tokens, largest_first=True),
    TableColumn("total_cost", ">Cost", lambda line: line.total_cost, usd=True, largest_first=True),
    TableColumn("wasted_cost", "", lambda line: line.wasted_cost, usd=True),
    TableColumn("cost_basis", "", lambda line: line.cost_basis),
    TableColumn("duration_ms", ">Took", lambda line: line.duration_ms, largest_first=True),
    TableColumn("reason", "", lambda line: line.reason),
    TableColumn("error_kind", "", lambda line: line.error_kind),
    TableColumn("error", "Error", lambda line: line.error_message, sortable=False),
    TableColumn("dry_run", "", lambda line: str(line.dry_run).lower()),
    TableColumn("cache_hit", "", lambda line: str(line.cache_hit).lower()),
)


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        given = {name: value for name in _NAMES if (value := request.query_params.get(name, "").strip())}
        time_range, wrong = time_range_of(request, context.now(), context.zone), ""
        before, after = request.query_params.get("before", ""), request.query_params.get("after", "")
        try:
            filters = filters_of(given, time_range.window)
            older = Cursor.parse(after) if after else None
            newer = Cursor.parse(before) if before and not after else None
        except ValueError as error:
            wrong, filters, older, newer = str(error), filters_of({}, time_range.window), None, None
        if request.query_params.get("csv") == ID:
            if wrong:
                return context.pages.plain(request, 400, "Nothing was saved", wrong)
            return await _saved(context, request, filters)
        size, smallest = _sorting(request)
        asked = (
            search(context.analytics, filters, after=older, before=newer, limit=PAGE)
            if size is None
            else _sorted_page(context, filters, size, smallest=smallest)
        )
        # Words are looked for in long texts, sorting reads all that match, and facets all of the time range.
        slow = filters.text is not None or (size is not None and time_range.is_long)
        listed = pending if follows(request, slow=slow) else fetched
        offered = pending if follows(request, slow=slow or time_range.is_long) else fetched
        page, number, choices = await asyncio.gather(
            listed(asked),
            listed(count(context.analytics, filters)),
            offered(facets(context.analytics, time_range.window)),
        )

        def link(**cursor: str) -> str:
            return f"/executions?{urlencode({**given, **time_range.query, **cursor})}"

        return context.pages.render(
            request,
            "executions.html",
            given=given,
            time_range=time_range,
            wrong=wrong,
            page=page,
            table=table_of(
                request, ID, "Executions", COLUMNS, page.value.lines if page.value else (), prefix="", filterable=False
            ),
            sort="" if size is None else request.query_params["sort"],
            number=number,
            facets=choices,
            statuses=[(status, None) for status in get_args(Status)],
            newer=link(before=page.value.newer.text) if page.value and page.value.newer else None,
            older=link(after=page.value.older.text) if page.value and page.value.older else None,
            first=not (before or after or size),
            newest=link(),
        )

    return [Route("/executions", show, methods=["GET"])]


def _sorting(request: Request) -> tuple[SortColumn | None, bool]:
    """What the executions are sorted by, and whether the smallest come first; by their end without `?sort=`."""
    wanted = request.query_params.get("sort", "")
    size = next((one for one in get_args(SortColumn) if one == wanted.removeprefix("-")), None)
    return size, wanted.startswith("-")


async def _sorted_page(context: PageContext, filters: Filters, size: SortColumn, *, smallest: bool) -> Page:
    return Page(await largest(context.analytics, filters, size, smallest=smallest, limit=PAGE), None, None)


async def _saved(context: PageContext, request: Request, filters: Filters) -> Response:
    """All that match as a file, the newest first; it breaks off if ClickHouse does."""
    begun = await fetched(search(context.analytics, filters, limit=SAVED_AT_ONCE))
    if (first := begun.value) is None:
        return context.pages.plain(request, 503, "Nothing was saved", begun.problem or "")

    async def parts() -> AsyncGenerator[str]:
        page, saved = first, 0
        yield csv_text(COLUMNS, (), head=True)
        while page.lines:
            yield csv_text(COLUMNS, page.lines)
            saved += len(page.lines)
            if page.older is None or saved >= MAX_SAVED:
                return
            page = await search(context.analytics, filters, after=page.older, limit=SAVED_AT_ONCE)

    return StreamingResponse(parts(), headers={**HEADERS, **csv_headers("executions")}, media_type="text/csv")


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
