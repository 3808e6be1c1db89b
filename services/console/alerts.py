"""Alerts: incidents that are open, past ones, how each developed, acting on them; and undelivered alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.events import Incident, IncidentCursor, cursor_of, incident_changes, incidents
from breakwater.contracts.alerts import (
    Alert,
    AlertEvent,
    AlertList,
    AlertReplays,
    IncidentStatus,
    UndeliveredAlert,
    UndeliveredList,
)
from services.console.operator_actions import act, back_to, reason_of, submitted, whole_number
from services.console.pages import Fetched, PageContext, fetched
from services.console.sessions import session_of
from services.console.tables import TableColumn, table_of
from services.console.time_range import time_range_of
from services.console.words import segment

PAGE = 50
MAX_SAVED = 10_000
"""Incidents that are sorted, filtered, or saved."""

STATUSES: tuple[IncidentStatus, ...] = get_args(IncidentStatus)
EVENTS: tuple[AlertEvent, ...] = get_args(AlertEvent)


_SEVERITIES = ("critical", "warning", "info")

OPEN: tuple[TableColumn[Alert], ...] = (
    TableColumn("severity", "Severity", lambda one: one.severity, order=lambda one: _SEVERITIES.index(one.severity)),
    TableColumn("incident", "Incident", lambda one: one.title),
    TableColumn("incident_id", "", lambda one: one.incident_id),
    TableColumn("event", "", lambda one: one.event),
    TableColumn("state", "State", lambda one: one.status),
    TableColumn("agent", "Agent", lambda one: one.agent),
    TableColumn("since", "Since", lambda one: one.opened_at, largest_first=True),
    TableColumn("happened", ">Happened", lambda one: one.count, largest_first=True),
)
UNDELIVERED: tuple[TableColumn[UndeliveredAlert], ...] = (
    TableColumn("channel", "Channel", lambda one: one.channel),
    TableColumn("alert", "Alert", lambda one: one.title),
    TableColumn("dead_letter", "", lambda one: one.dead_letter_id),
    TableColumn("error", "Error", lambda one: one.error),
    TableColumn("gave_up", "Gave up", lambda one: one.at, largest_first=True),
    TableColumn("replayed", "Replayed", lambda one: "yes" if one.replayed else "no"),
)
PAST: tuple[TableColumn[Incident], ...] = (
    TableColumn("started", "Started", lambda one: one.opened_at, largest_first=True),
    TableColumn("incident", "Incident", lambda one: one.title),
    TableColumn("incident_id", "", lambda one: one.incident_id),
    TableColumn("event", "", lambda one: one.first_event),
    TableColumn("severity", "Severity", lambda one: one.highest_severity),
    TableColumn("state", "State", lambda one: one.status),
    TableColumn("agent", "Agent", lambda one: one.agent),
    TableColumn("happened", ">Happened", lambda one: one.count, largest_first=True),
    TableColumn("lasted_ms", ">Lasted", lambda one: one.duration_ms, largest_first=True),
    TableColumn("acknowledged_after_ms", ">Acknowledged", lambda one: one.time_to_acknowledge_ms, largest_first=True),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show(request: Request) -> Response:
        api, chosen = session_of(request).api, _chosen(request)
        time_range = time_range_of(request, context.now(), context.zone, "7d")
        # The order and the filter are of all, and so is the file.
        whole = not request.query_params.keys().isdisjoint(("csv", "history.sort", "history.find"))
        page = MAX_SAVED if whole else PAGE
        known, undelivered, past = await asyncio.gather(
            fetched(api.read(AlertList, "alerts", {"limit": 200})),
            fetched(api.read(UndeliveredList, "alerts/undelivered", {"limit": 50})),
            fetched(incidents(context.analytics, time_range.window, **chosen, before=_before(request), limit=page + 1)),
        )
        return context.pages.render(
            request,
            "alerts.html",
            time_range=time_range,
            known=known,
            open_table=table_of(request, "now", "Open incidents", OPEN, known.value.alerts if known.value else ()),
            undelivered=undelivered,
            undelivered_table=table_of(
                request,
                "undelivered",
                "Undelivered alerts",
                UNDELIVERED,
                undelivered.value.undelivered if undelivered.value else (),
            ),
            not_replayed=any(not one.replayed for one in undelivered.value.undelivered) if undelivered.value else False,
            past=past,
            past_table=table_of(request, "history", "Incidents", PAST, (past.value or ())[:page], most=PAGE),
            older=None if whole else _older(request, past),
            chosen=chosen,
            statuses=STATUSES,
            events=EVENTS,
        )

    async def show_one(request: Request) -> Response:
        incident_id = request.path_params["incident_id"]
        known, changes = await asyncio.gather(
            fetched(session_of(request).api.read(Alert, f"alerts/{segment(incident_id)}")),
            fetched(incident_changes(context.analytics, incident_id)),
        )
        newest = known.value or (changes.value[-1] if changes.value else None)
        if newest is None and not changes.problem:
            text = known.problem or f"There is no incident {incident_id!r}."
            return context.pages.plain(request, 404, "Incident not found", text)
        return context.pages.render(
            request,
            "alert.html",
            incident_id=known.value.incident_id if known.value else incident_id,
            # One that was resolved long ago is in ClickHouse only, and can't be acted on.
            live=known.value is not None,
            known=known,
            newest=newest,
            changes=changes,
            execution_id=_text_of(newest.payload, "execution_id") if newest else None,
            budget=_budget_of(newest.payload) if newest and newest.event.startswith("budget") else None,
        )

    async def acknowledge(request: Request) -> Response:
        return await _change(request, "ack", "is acknowledged: no more reminders are sent")

    async def resolve(request: Request) -> Response:
        return await _change(request, "resolve", "is resolved")

    async def _change(request: Request, action: Literal["ack", "resolve"], outcome: str) -> Response:
        session, fields = await submitted(request, approval=True)
        incident_id = fields.get("incident_id")
        body = {"incident_id": incident_id, "reason": reason_of(fields)}
        if (result := await act(session, dict[str, Any], f"alerts/{action}", body)) is not None:
            already = "Another operator was faster: nothing was changed. The current state is below."
            session.notify(already if "unchanged" in result else f"The incident {outcome}.")
        return back_to(f"/alerts/{segment(incident_id)}" if fields.get("from") == "one" else "/alerts")

    async def replay(request: Request) -> Response:
        session, fields = await submitted(request)
        number, after = fields.get("dead_letter_id"), fields.get("after")
        if any(given and not whole_number(given) for given in (number, after)):
            # Without it, all of them would be retried.
            session.notify("The action failed: a dead letter is identified by its number, which is shown below.", "bad")
            return back_to("/alerts")
        body: dict[str, object] = {"reason": reason_of(fields)}
        if number:
            body["dead_letter_id"] = whole_number(number)
        elif after:
            body["after"] = whole_number(after)
        replayed = await act(session, AlertReplays, "alerts/replay", body)
        if replayed is None:
            return back_to("/alerts")
        session.notify(_outcome(replayed))
        return back_to("/alerts", {"more_after": str(replayed.continue_after) if replayed.continue_after else None})

    return [
        Route("/alerts", show, methods=["GET"]),
        Route("/alerts/ack", acknowledge, methods=["POST"]),
        Route("/alerts/resolve", resolve, methods=["POST"]),
        Route("/alerts/replay", replay, methods=["POST"]),
        Route("/alerts/{incident_id:path}", show_one, methods=["GET"]),
    ]


def _chosen(request: Request) -> dict[str, str]:
    """The filters of the history; unknown statuses and events are ignored."""
    query = request.query_params
    status, event = query.get("status", ""), query.get("event", "")
    return {
        "status": status if status in STATUSES else "",
        "event": event if event in EVENTS else "",
        "agent": query.get("agent", "").strip(),
    }


def _before(request: Request) -> IncidentCursor | None:
    """Where a later page of the history begins."""
    moment, _, incident_id = request.query_params.get("before", "").partition("-")
    if not moment.isdecimal() or len(moment) > 15:
        return None
    return IncidentCursor(int(moment), incident_id)


def _older(request: Request, past: Fetched[tuple[Incident, ...]]) -> str | None:
    """The URL of the next page of the history; None on the last one."""
    if past.value is None or len(past.value) <= PAGE:
        return None
    place = cursor_of(past.value[PAGE - 1])
    query = {name: value for name, value in request.query_params.items() if name not in ("before", "more_after")}
    return f"/alerts?{urlencode({**query, 'before': f'{place.opened_ms}-{place.incident_id}'})}#history"


def _outcome(replayed: AlertReplays) -> str:
    """The result of a replay, in words."""
    by = ", ".join(f"{count:,} by {channel}" for channel, count in replayed.channels.items())
    parts = [f"{replayed.replayed:,} will be retried{f' ({by})' if by else ''}"]
    if replayed.already:
        parts.append(f"{replayed.already:,} had been retried before")
    if replayed.skipped:
        parts.append(f"{replayed.skipped:,} are of channels that are no longer configured")
    more = " There are more: continue below." if replayed.continue_after else ""
    return f"{'; '.join(parts)}.{more}"


def _budget_of(payload: object) -> str | None:
    """The name of an incident's budget."""
    scope, window = _text_of(payload, "scope"), _text_of(payload, "window")
    of = None if scope is None or scope == "global" else _text_of(payload, scope)
    if scope is None or window is None or (of is None and scope != "global"):
        return None
    return f"{scope if of is None else f'{scope}:{of}'}/{window}"


def _text_of(payload: object, name: str) -> str | None:
    if not isinstance(payload, Mapping):
        return None
    value: object = payload.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else None
