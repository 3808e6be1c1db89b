"""Pages as functions of plain values, and the routes that serve them.

A page has parts and a view. The parts are read from the HTTP API and ClickHouse at the same time. The view is a pure
function of the visit and the parts, which returns the template's other values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiClient
from breakwater.health.pages import badges
from breakwater.identity.pages.rendering import PageContext, PagePart, fetch_part, pending
from breakwater.identity.pages.sessions import Session, session_of
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.pages.shared_reads import SharedReads
from breakwater.kernel.pages.tables import PageTable, TableUrl, csv_headers, csv_text
from breakwater.kernel.pages.time_range import BY_DATA, CUSTOM, WINDOWS, TimeRange, time_range_of
from breakwater.records.events import ConfigChange, config_changes
from breakwater.records.figures import first_begun

T = TypeVar("T")

FITTING_RANGE_TIMEOUT_S = 1.0
"""Seconds for which a page waits for the time range that fits the data."""
FIRST_RUN_AGE_S = 30.0
CHANGES_AGE_S = 15.0
"""Seconds for which viewers share what was read last."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The request for a page as plain values."""

    address: TableUrl
    now: datetime
    zone: ZoneInfo
    """The time zone in which the days and months of budgets begin."""
    session: Session
    path_params: Mapping[str, str] = field(default_factory=dict[str, str])
    is_refresh: bool = False
    """True if the script of an open page requests its new state."""
    default_range: str = "24h"
    """The time range if the URL selects none."""

    def get(self, name: str) -> str:
        """A parameter of the URL's query, stripped; empty if it is missing."""
        return self.address.query.get(name, "").strip()

    @property
    def time_range(self) -> TimeRange:
        """The time range that the URL selects.

        Raises:
            HTTPException: with status 400, if it is invalid.
        """
        return time_range_of(self.address, self.now, self.zone, self.default_range)

    async def part(self, read: Coroutine[Any, Any, T], *, slow: bool) -> PagePart[T]:
        """Reads a part of the page. A slow part is pending in the first response, and the page's script requests it."""
        needs_all_parts = self.is_refresh or not self.address.query.keys().isdisjoint(("whole", "csv"))
        return await (pending(read) if slow and not needs_all_parts else fetch_part(read))


@dataclass(frozen=True, slots=True)
class ReadModels:
    """The sources of the read models."""

    api: ApiClient
    analytics: Analytics
    shared: SharedReads


@dataclass(frozen=True, slots=True)
class NotFound:
    """The result of the view of a page that does not exist."""

    title: str
    text: str


View = Callable[..., Mapping[str, Any] | NotFound]
"""A view takes the visit, and the parts by name; it returns the template's other values."""
PartReader = Callable[[Visit, ReadModels], Awaitable[Any]]


def page(
    context: PageContext, path: str, template: str, view: View, *, default_range: str = "24h", **parts: PartReader
) -> Route:
    """Makes the route of a page."""

    async def show(request: Request) -> Response:
        return await render_page(context, request, template, view, default_range=default_range, **parts)

    return Route(path, show, methods=["GET"])


async def render_page(
    context: PageContext,
    request: Request,
    template: str,
    view: View,
    default_range: str = "24h",
    **parts: PartReader,
) -> Response:
    """Renders a page; with `?csv=` one of its tables as a CSV.

    The variables of the template are the parts, the values of the view, and `visit`.
    """
    visit = visit_of(context, request, default_range)
    models = ReadModels(visit.session.api, context.analytics, context.shared)
    if default_range == BY_DATA:
        visit = replace(visit, default_range=await _fitting_range(visit, models))

    async def read_part(reader: PartReader) -> Any:
        return await reader(visit, models)

    values_of_parts, _ = await asyncio.gather(
        asyncio.gather(*(read_part(reader) for reader in parts.values())), badges.renew(visit.session)
    )
    parts_by_name = dict(zip(parts, values_of_parts, strict=True))
    view_values = view(visit, **parts_by_name)
    if isinstance(view_values, NotFound):
        return context.pages.plain(request, 404, view_values.title, view_values.text)
    csv_id = visit.get("csv")
    if csv_id:
        return _csv_response(context, request, csv_id, view_values.values())
    return context.pages.render(request, template, visit=visit, **{**parts_by_name, **view_values})


def _csv_response(context: PageContext, request: Request, csv_id: str, view_values: Iterable[Any]) -> Response:
    """Answers with the table of the id as a CSV; with 404 if the page has no such table now."""
    for value in view_values:
        if isinstance(value, PageTable) and value.id == csv_id:  # pyright: ignore[reportUnknownMemberType]
            text = csv_text(value.columns, value.ordered)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            return Response(text, headers=csv_headers(csv_id), media_type="text/csv")
    message = f"The page has no table {csv_id!r} now: its data is unavailable, or it is empty."
    return context.pages.plain(request, 404, "Nothing to save", message)


def sums_reader(read_sums: Callable[..., Coroutine[Any, Any, Any]], *, preceding: bool = False) -> PartReader:
    """Makes the reader of sums over the time range: of the agent in the path, or of all; slow if the range is long.

    Args:
        read_sums: reads the sums of a window, with `agent` for those of one agent.
        preceding: True for the sums of the time just before the time range, as long as it.
    """

    def read_part(visit: Visit, models: ReadModels) -> Awaitable[Any]:
        time_range = visit.time_range
        filters = {"agent": visit.path_params["name"]} if "name" in visit.path_params else {}
        window = time_range.window.preceding if preceding else time_range.window
        return visit.part(read_sums(models.analytics, window, **filters), slow=time_range.is_long)

    return read_part


async def changes_reader(visit: Visit, models: ReadModels) -> PagePart[tuple[ConfigChange, ...]]:
    """Reads the configs that were applied in the time range. All viewers of a range share the read for a while."""
    time_range = visit.time_range
    window = time_range.window
    bounds = (window.start, window.end) if time_range.name == CUSTOM else ()
    reading = models.shared.get(
        ("config changes", time_range.name, *bounds), CHANGES_AGE_S, lambda: config_changes(models.analytics, window)
    )
    return await fetch_part(reading)


async def _fitting_range(visit: Visit, models: ReadModels) -> str:
    """The shortest time range that contains all runs of the last 24 hours; `24h` if the URL selects a range itself."""
    if not visit.address.query.keys().isdisjoint(("window", "from", "to")):
        return "24h"
    since = visit.now - WINDOWS["24h"]
    reading = models.shared.get("first run", FIRST_RUN_AGE_S, lambda: first_begun(models.analytics, since=since))
    first_run = await fetch_part(asyncio.wait_for(reading, FITTING_RANGE_TIMEOUT_S))
    if first_run.value is None:
        return "24h"
    age = visit.now - first_run.value
    return next((name for name in ("15m", "1h") if age <= WINDOWS[name]), "24h")


def visit_of(context: PageContext, request: Request, default_range: str = "24h") -> Visit:
    """Turns a request into plain values."""
    return Visit(
        TableUrl(request.url.path, dict(request.query_params)),
        context.now(),
        context.zone,
        session_of(request),
        dict(request.path_params),
        "x-refresh" in request.headers,
        default_range,
    )
