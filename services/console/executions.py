"""All executions: filtered, searched, and paged through, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, get_args
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
        page, number, choices = await asyncio.gather(
            fetched(search(context.analytics, filters, after=older, before=newer, limit=PAGE)),
            fetched(count(context.analytics, filters)),
            fetched(facets(context.analytics, time_range.window)),
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
            number=number,
            facets=choices,
            statuses=[(status, None) for status in get_args(Status)],
            newer=link(before=page.value.newer.text) if page.value and page.value.newer else None,
            older=link(after=page.value.older.text) if page.value and page.value.older else None,
            first=not (before or after),
            newest=link(),
        )

    return [Route("/executions", show, methods=["GET"])]


def filters_of(given: Mapping[str, str], window: Window) -> Filters:
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
