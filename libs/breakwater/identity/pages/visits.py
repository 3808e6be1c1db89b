"""Pages as functions of plain values, and the routes that serve them.

A page has parts, which are asked of the HTTP API and ClickHouse together, and a view: a pure function of the visit and
of these parts that returns the other values of the template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiClient
from breakwater.health.pages import badges
from breakwater.identity.pages.pages import Fetched, PageContext, fetched, pending
from breakwater.identity.pages.sessions import Session, session_of
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.pages.tables import PageTable, TableUrl, csv_headers, csv_text
from breakwater.kernel.pages.time_range import BY_DATA, WINDOWS, TimeRange, time_range_of
from breakwater.records.figures import first_begun

T = TypeVar("T")

FITTING_S = 1.0
"""The time for which a page waits for the time range that fits the data."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The request for a page, as plain values."""

    address: TableUrl
    now: datetime
    zone: ZoneInfo
    """The time zone in which the days and months of budgets begin."""
    session: Session
    path_params: Mapping[str, str] = field(default_factory=dict[str, str])
    is_refresh: bool = False
    """True if the script of an open page asks for its new state."""
    default_range: str = "24h"
    """The time range if the address names none."""

    def get(self, name: str) -> str:
        """A parameter of the query, stripped; empty if there is none."""
        return self.address.query.get(name, "").strip()

    @property
    def time_range(self) -> TimeRange:
        """The time range that the address names.

        Raises:
            HTTPException: it is invalid; with status 400.
        """
        return time_range_of(self.address, self.now, self.zone, self.default_range)

    async def part(self, asked: Coroutine[Any, Any, T], *, slow: bool) -> Fetched[T]:
        """A part of the page. A slow one follows the first response: the script of the page asks for it."""
        whole = self.is_refresh or not self.address.query.keys().isdisjoint(("whole", "csv"))
        return await (pending if slow and not whole else fetched)(asked)


@dataclass(frozen=True, slots=True)
class ReadModels:
    """The stores of the read models."""

    api: ApiClient
    analytics: Analytics


@dataclass(frozen=True, slots=True)
class NotFound:
    """The view of a page that there is not."""

    title: str
    text: str


View = Callable[..., Mapping[str, Any] | NotFound]
"""Takes the visit, and the parts by their names."""
PartReader = Callable[[Visit, ReadModels], Awaitable[Any]]


def page(
    context: PageContext, path: str, template: str, view: View, *, default_range: str = "24h", **parts: PartReader
) -> Route:
    """The route of a page."""

    async def show(request: Request) -> Response:
        return await shown(context, request, template, view, default_range=default_range, **parts)

    return Route(path, show, methods=["GET"])


async def shown(
    context: PageContext,
    request: Request,
    template: str,
    view: View,
    default_range: str = "24h",
    **parts: PartReader,
) -> Response:
    """A page as a response; as a CSV of one of its tables with `?csv=`.

    The template gets the parts, the values of the view, and `visit`.
    """
    visit = visit_of(context, request, default_range)
    models = ReadModels(visit.session.api, context.analytics)
    if default_range == BY_DATA:
        visit = replace(visit, default_range=await _fitting(visit, models.analytics))

    async def asked(part: PartReader) -> Any:
        return await part(visit, models)

    found, _ = await asyncio.gather(
        asyncio.gather(*(asked(part) for part in parts.values())), badges.renew(visit.session)
    )
    by_name = dict(zip(parts, found, strict=True))
    values = view(visit, **by_name)
    if isinstance(values, NotFound):
        return context.pages.plain(request, 404, values.title, values.text)
    if wanted := visit.get("csv"):
        for table in values.values():
            if isinstance(table, PageTable) and table.id == wanted:  # pyright: ignore[reportUnknownMemberType]
                text = csv_text(table.columns, table.ordered)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                return Response(text, headers=csv_headers(wanted), media_type="text/csv")
        missing = f"The page has no table {wanted!r} now: its data is unavailable, or it is empty."
        return context.pages.plain(request, 404, "Nothing to save", missing)
    return context.pages.render(request, template, visit=visit, **{**by_name, **values})


def summed(sums: Callable[..., Coroutine[Any, Any, Any]]) -> PartReader:
    """A part that sums up the time range, of the agent that the path names if it names one; slow if it is long."""

    def part(visit: Visit, models: ReadModels) -> Awaitable[Any]:
        of = {"agent": visit.path_params["name"]} if "name" in visit.path_params else {}
        return visit.part(sums(models.analytics, visit.time_range.window, **of), slow=visit.time_range.is_long)

    return part


async def _fitting(visit: Visit, analytics: Analytics) -> str:
    """The name of the shortest time range that holds what ran within 24 hours; `24h` if the address names another."""
    if visit.address.query.keys().isdisjoint(("window", "from", "to")):
        asked = first_begun(analytics, since=visit.now - WINDOWS["24h"])
        if (first := (await fetched(asyncio.wait_for(asked, FITTING_S))).value) is not None:
            return next((name for name in ("15m", "1h") if visit.now - first <= WINDOWS[name]), "24h")
    return "24h"


def visit_of(context: PageContext, request: Request, default_range: str = "24h") -> Visit:
    """A request as plain values."""
    return Visit(
        TableUrl(request.url.path, dict(request.query_params)),
        context.now(),
        context.zone,
        session_of(request),
        dict(request.path_params),
        "x-refresh" in request.headers,
        default_range,
    )
