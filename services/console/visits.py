"""Pages as functions of plain values, and the routes that serve them.

A page has two parts. `read` asks the HTTP API and ClickHouse for its read models; `view` is a pure function of the
visit and of these models, and returns the values of the template.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar, TypeVarTuple
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.client import Analytics
from breakwater.client import ApiClient
from services.console.pages import Fetched, PageContext, fetched, pending
from services.console.sessions import Session, session_of
from services.console.tables import Address, PageTable, csv_headers, csv_text
from services.console.time_range import TimeRange, time_range_of

T = TypeVar("T")
Models = TypeVarTuple("Models")


@dataclass(frozen=True, slots=True)
class Visit:
    """The request for a page, as plain values."""

    address: Address
    now: datetime
    zone: ZoneInfo
    """The time zone in which the days and months of budgets begin."""
    session: Session
    path_params: Mapping[str, str] = field(default_factory=dict[str, str])
    is_refresh: bool = False
    """True if the script of an open page asks for its new state."""

    def get(self, name: str) -> str:
        """A parameter of the query, stripped; empty if there is none."""
        return self.address.query.get(name, "").strip()

    def time_range(self, default: str = "24h") -> TimeRange:
        """The time range that the address names.

        Raises:
            HTTPException: it is invalid; with status 400.
        """
        return time_range_of(self.address, self.now, self.zone, default)

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
    status: int = 404


View = Mapping[str, Any]
"""Values of a template."""


def page(
    context: PageContext,
    path: str,
    template: str,
    read: Callable[[Visit, ReadModels], Awaitable[tuple[*Models]]],
    view: Callable[[Visit, *Models], View | NotFound],
) -> Route:
    """The route of a page."""

    async def show(request: Request) -> Response:
        return await shown(context, request, template, read, view)

    return Route(path, show, methods=["GET"])


async def shown(
    context: PageContext,
    request: Request,
    template: str,
    read: Callable[[Visit, ReadModels], Awaitable[tuple[*Models]]],
    view: Callable[[Visit, *Models], View | NotFound],
) -> Response:
    """A page as a response; as a CSV of one of its tables with `?csv=`."""
    visit = visit_of(context, request)
    values = view(visit, *await read(visit, ReadModels(visit.session.api, context.analytics)))
    if isinstance(values, NotFound):
        return context.pages.plain(request, values.status, values.title, values.text)
    if wanted := visit.get("csv"):
        for table in values.values():
            if isinstance(table, PageTable) and table.id == wanted:  # pyright: ignore[reportUnknownMemberType]
                text = csv_text(table.columns, table.ordered)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                return Response(text, headers=csv_headers(wanted), media_type="text/csv")
        missing = f"The page has no table {wanted!r} now: what is in it can't be read, or there is nothing in it."
        return context.pages.plain(request, 404, "Nothing to save", missing)
    return context.pages.render(request, template, **values)


def visit_of(context: PageContext, request: Request) -> Visit:
    """A request as plain values."""
    return Visit(
        Address(request.url.path, dict(request.query_params)),
        context.now(),
        context.zone,
        session_of(request),
        dict(request.path_params),
        "x-refresh" in request.headers,
    )
