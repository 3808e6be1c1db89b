"""The audit log: every operator action, its time and its outcome."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.identity.pages.pages import Fetched, PageContext, fetched
from breakwater.identity.pages.sessions import session_of
from breakwater.identity.pages.visits import ReadModels, Visit, shown
from breakwater.jobs.contract.events import AuditEvent
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import WINDOWS, window_links, window_of
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.events import MOST, audit_events, audit_names

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
            return await shown(context, request, "audit.html", view, found=_found, known=_known)
        text = f"{session.name!r} lacks the scope `audit`, which the audit log requires."
        return context.pages.plain(request, 403, "No access", text)

    return [Route("/audit", show, methods=["GET"])]


def _period(visit: Visit) -> TimeWindow:
    return TimeWindow.last(WINDOWS[window_of(visit.address, "7d")], visit.now)


def _found(visit: Visit, models: ReadModels) -> Awaitable[Fetched[tuple[AuditEvent, ...]]]:
    by, action = visit.get("by"), visit.get("action")
    return fetched(audit_events(models.analytics, _period(visit), by=by, action=action))


def _known(visit: Visit, models: ReadModels) -> Awaitable[Fetched[tuple[list[str], list[str]]]]:
    return fetched(audit_names(models.analytics, _period(visit)))


def view(
    visit: Visit, found: Fetched[tuple[AuditEvent, ...]], known: Fetched[tuple[list[str], list[str]]]
) -> dict[str, Any]:
    """A table of the actions, with a form to choose them."""
    window, by, action = window_of(visit.address, "7d"), visit.get("by"), visit.get("action")
    people, kinds = known.value or ([], [])
    return {
        "window": window,
        "windows": window_links(visit.address, window),
        "table": PageTable(visit.address, "log", "Actions", COLUMNS, found.value or (), filters=("by", "action")),
        "by": by,
        "action": action,
        "people": sorted({*people, by} - {""}),
        "kinds": sorted({*kinds, action} - {""}),
        "most": MOST,
    }
