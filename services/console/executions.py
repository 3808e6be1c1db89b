"""All executions: found by filters, searched, and paged through, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.search import Cursor, Filters, count, facets, search
from breakwater.analytics.window import Window
from breakwater.contracts.execution import Status
from breakwater.contracts.types import NANO_PER_USD
from services.console.pages import PageContext, fetched
from services.console.time_range import time_range_of

PAGE = 50
_NAMES = ("agent", "status", "reason", "model", "tenant", "task_id", "error_kind", "text", "min_cost")


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        return await _show(context, request)

    return [Route("/executions", show, methods=["GET"])]


async def _show(context: PageContext, request: Request) -> Response:
    given = {name: value for name in _NAMES if (value := request.query_params.get(name, "").strip())}
    time_range, wrong = time_range_of(request, context.now(), context.zone), ""
    window = time_range.name
    before, after = request.query_params.get("before", ""), request.query_params.get("after", "")
    try:
        filters = filters_of(given, time_range.window)
        older = Cursor.parse(after) if after else None
        newer = Cursor.parse(before) if before and not after else None
    except ValueError as error:
        wrong, filters, older, newer = str(error), filters_of({}, time_range.window), None, None
    page, number, seen = await asyncio.gather(
        fetched(search(context.analytics, filters, after=older, before=newer, limit=PAGE)),
        fetched(count(context.analytics, filters)),
        fetched(facets(context.analytics, time_range.window)),
    )
    links: dict[str, str | None] = {"newer": None, "older": None}
    if page.value is not None:
        if page.value.newer is not None:
            links["newer"] = _link(given, window, before=page.value.newer.text)
        if page.value.older is not None:
            links["older"] = _link(given, window, after=page.value.older.text)
    return context.pages.render(
        request,
        "executions.html",
        given=given,
        window=window,
        windows=time_range.links,
        within=time_range.words,
        wrong=wrong,
        page=page,
        number=number,
        facets=seen,
        statuses=[(status, None) for status in get_args(Status)],
        links=links,
        first=not (before or after),
        newest=_link(given, window),
    )


def filters_of(given: Mapping[str, str], window: Window) -> Filters:
    """What a form asks for.

    Args:
        given: fields that are not empty, by name; `min_cost` in dollars.
        window: when they ended.

    Raises:
        ValueError: a field is not what it should be; the text says what.
    """
    return Filters(
        agent=given.get("agent"),
        status=given.get("status"),
        reason=given.get("reason"),
        model=given.get("model"),
        tenant=given.get("tenant"),
        task_id=given.get("task_id"),
        error_kind=given.get("error_kind"),
        text=given.get("text"),
        min_cost=_nano(given["min_cost"]) if "min_cost" in given else None,
        since=window.start,
        until=window.end,
    )


def _nano(dollars: str) -> int:
    try:
        nano = Decimal(dollars.lstrip("$")) * NANO_PER_USD
    except InvalidOperation:
        nano = Decimal("NaN")
    if not nano.is_finite() or not 0 <= nano < 10**18:
        raise ValueError(f"cost at least: {dollars!r} is no amount of dollars such as 0.05")
    return int(nano)


def _link(given: Mapping[str, str], window: str, **more: str) -> str:
    return f"/executions?{urlencode({**given, 'window': window, **more})}"
