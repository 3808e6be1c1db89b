"""The page of the audit log: all operator actions with their times and outcomes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.identity.contract import AuditEvent
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.sessions import session_of
from breakwater.identity.pages.visits import ReadModels, Visit, render_page
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import WINDOWS, window_links, window_of
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.events import MOST, audit_events, audit_names

COLUMNS: tuple[Column[AuditEvent], ...] = (
    Column("time", lambda event: event.at, "time"),
    Column("who", lambda event: event.by),
    Column("actor", lambda event: event.actor, page=False),
    Column("actor_id", lambda event: event.actor_id, page=False),
    Column("action", lambda event: event.action, "words"),
    Column("outcome", lambda event: event.outcome, "state"),
    Column("error", lambda event: event.error, page=False),
    Column("on", lambda event: to_json(event.details).decode(), name="details", below=True),
    Column("reason", lambda event: event.reason, below=True),
)

LINK = NavigationLink("/audit", "Audit log", "t")


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        session = session_of(request)
        if session.may_audit:
            return await render_page(context, request, "audit.html", view, events=_events, names=_names)
        text = f"{session.name!r} lacks the scope `audit`, which the audit log requires."
        return context.pages.plain(request, 403, "No access", text)

    return [Route("/audit", show, methods=["GET"])]


def _window(visit: Visit) -> TimeWindow:
    return TimeWindow.last(WINDOWS[window_of(visit.address, "7d")], visit.now)


def _events(visit: Visit, models: ReadModels) -> Awaitable[PagePart[tuple[AuditEvent, ...]]]:
    by = visit.get("by")
    action = visit.get("action")
    return fetch_part(audit_events(models.analytics, _window(visit), by=by, action=action))


def _names(visit: Visit, models: ReadModels) -> Awaitable[PagePart[tuple[list[str], list[str]]]]:
    return fetch_part(audit_names(models.analytics, _window(visit)))


def view(
    visit: Visit, events: PagePart[tuple[AuditEvent, ...]], names: PagePart[tuple[list[str], list[str]]]
) -> dict[str, Any]:
    """The values of the page: a table of the actions, and a form that filters them."""
    window = window_of(visit.address, "7d")
    by = visit.get("by")
    action = visit.get("action")
    people, kinds = names.value if names.value else ([], [])
    return {
        "window": window,
        "windows": window_links(visit.address, window),
        "table": PageTable(visit.address, "log", "Actions", COLUMNS, events.value or (), filters=("by", "action")),
        "by": by,
        "action": action,
        "people": sorted({*people, by} - {""}),
        "kinds": sorted({*kinds, action} - {""}),
        "max_rows": MOST,
    }
