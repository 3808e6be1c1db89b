"""The audit log: every operator action, its time and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.events import MOST, audit_events, audit_names
from breakwater.analytics.window import TimeWindow
from breakwater.contracts.events import AuditEvent
from breakwater.views.columns import Column
from services.console.pages import Fetched, PageContext, fetched
from services.console.sessions import session_of
from services.console.tables import PageTable
from services.console.time_range import WINDOWS, window_links, window_of
from services.console.visits import ReadModels, View, Visit, shown

COLUMNS: tuple[Column[AuditEvent], ...] = (
    Column("time", lambda one: one.at, "time"),
    Column("who", lambda one: one.by),
    Column("actor", lambda one: one.actor, page=False),
    Column("actor_id", lambda one: one.actor_id, page=False),
    Column("action", lambda one: one.action, "words"),
    Column("outcome", lambda one: one.outcome, "state"),
    Column("error", lambda one: one.error, page=False),
    Column("on", lambda one: to_json(one.details).decode(), name="details", below=True),
    Column("reason", lambda one: one.reason, below=True),
)


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        session = session_of(request)
        if session.may_audit:
            return await shown(context, request, "audit.html", read, view)
        text = f"{session.name!r} lacks the scope `audit`, which the audit log takes."
        return context.pages.plain(request, 403, "No access", text)

    return [Route("/audit", show, methods=["GET"])]


def read(
    visit: Visit, models: ReadModels
) -> Awaitable[tuple[Fetched[tuple[AuditEvent, ...]], Fetched[tuple[list[str], list[str]]]]]:
    """The actions of the time range, and the people and kinds of action in it."""
    period = TimeWindow.last(WINDOWS[window_of(visit.address, "7d")], visit.now)
    return asyncio.gather(
        fetched(audit_events(models.analytics, period, by=visit.get("by"), action=visit.get("action"))),
        fetched(audit_names(models.analytics, period)),
    )


def view(visit: Visit, found: Fetched[tuple[AuditEvent, ...]], known: Fetched[tuple[list[str], list[str]]]) -> View:
    """A table of the actions, with a form to choose them."""
    window, by, action = window_of(visit.address, "7d"), visit.get("by"), visit.get("action")
    people, kinds = known.value or ([], [])
    return {
        "window": window,
        "windows": window_links(visit.address, window),
        "found": found,
        "table": PageTable(visit.address, "log", "Actions", COLUMNS, found.value or ()),
        "by": by,
        "action": action,
        "people": sorted({*people, by} - {""}),
        "kinds": sorted({*kinds, action} - {""}),
        "most": MOST,
    }
