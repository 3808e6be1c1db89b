"""The audit log: who did what, when, and what came of it."""

from __future__ import annotations

import asyncio

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.events import MOST, audit_events, audit_names
from breakwater.analytics.window import TimeWindow
from breakwater.contracts.events import AuditEvent
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.tables import TableColumn, table_of
from services.console.time_range import WINDOWS, window_links, window_of

COLUMNS: tuple[TableColumn[AuditEvent], ...] = (
    TableColumn("time", "Time", lambda one: one.at, largest_first=True),
    TableColumn("who", "Who", lambda one: one.by),
    TableColumn("actor", "", lambda one: one.actor),
    TableColumn("actor_id", "", lambda one: one.actor_id),
    TableColumn("action", "Action", lambda one: one.action),
    TableColumn("outcome", "Outcome", lambda one: one.outcome),
    TableColumn("error", "", lambda one: one.error),
    TableColumn("details", "On", lambda one: to_json(one.details).decode()),
    TableColumn("reason", "Reason", lambda one: one.reason),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""

    async def show(request: Request) -> Response:
        session = session_of(request)
        if not session.may_audit:
            text = f"{session.name!r} lacks the scope `audit`, which the audit log takes."
            return context.pages.plain(request, 403, "No access", text)
        window = window_of(request, "7d")
        period = TimeWindow.last(WINDOWS[window], context.now())
        by, action = (request.query_params.get(name, "").strip() for name in ("by", "action"))
        found, known = await asyncio.gather(
            fetched(audit_events(context.analytics, period, by=by, action=action)),
            fetched(audit_names(context.analytics, period)),
        )
        people, kinds = known.value or ([], [])
        return context.pages.render(
            request,
            "audit.html",
            window=window,
            windows=window_links(request, window),
            found=found,
            table=table_of(request, "log", "Actions", COLUMNS, found.value or ()),
            by=by,
            action=action,
            people=sorted({*people, by} - {""}),
            kinds=sorted({*kinds, action} - {""}),
            most=MOST,
        )

    return [Route("/audit", show, methods=["GET"])]
