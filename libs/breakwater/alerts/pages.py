"""The pages of alerts: open and past incidents, their changes, undelivered alerts, and the actions on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.alerts.contract import Alert, AlertEvent, AlertList, AlertReplays, IncidentStatus, UndeliveredList
from breakwater.alerts.rules.alert_rules import budget_of, concerned_agents, severity_now
from breakwater.alerts.views import INCIDENTS, NO_CHANNEL, UNDELIVERED
from breakwater.identity.pages.operator_actions import (
    Fields,
    act,
    action,
    back_to,
    read_action,
    reason_of,
    whole_number,
)
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment
from breakwater.records.events import Incident, IncidentCursor, cursor_of, incident_changes, incidents

PAGE_ROWS = 50
MAX_SAVED = 10_000
"""Maximum number of incidents that are sorted, filtered, or saved."""

STATUSES: tuple[IncidentStatus, ...] = get_args(IncidentStatus)
EVENTS: tuple[AlertEvent, ...] = get_args(AlertEvent)

FILTERS = ("status", "event", "agent", "before")
"""Parameters of the URL that a change of the history's filter replaces."""

_PAST_AGENT: Column[Any] = Column("agent", lambda incident: ", ".join(incident.concerned_agents) or None)

PAST: tuple[Column[Any], ...] = (
    *(_PAST_AGENT if column.key == "agent" else column for column in INCIDENTS if column.key != "since"),
    Column("started", lambda incident: incident.opened_at, "time"),
    Column("lasted", lambda incident: incident.duration_ms, "duration", name="lasted_ms", missing="ongoing"),
    Column(
        "acknowledged",
        lambda incident: incident.time_to_acknowledge_ms,
        "duration",
        name="acknowledged_after_ms",
        page=False,
    ),
)

LINK = NavigationLink("/alerts", "Alerts", "l")


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    acknowledged = _outcome("is acknowledged: no more reminders are sent")
    resolved = _outcome("is resolved")
    return [
        page(
            context,
            "/alerts",
            "alerts.html",
            view,
            default_range="7d",
            unresolved=lambda _, models: fetch_part(models.api.read(AlertList, "alerts", {"limit": 200})),
            undelivered=lambda _, models: fetch_part(
                models.api.read(UndeliveredList, "alerts/undelivered", {"limit": 50})
            ),
            past=_past,
        ),
        action("/alerts/ack", "alerts/ack", dict[str, Any], _body, acknowledged, _back, approval=True),
        action("/alerts/resolve", "alerts/resolve", dict[str, Any], _body, resolved, _back, approval=True),
        Route("/alerts/replay", replay, methods=["POST"]),
        page(
            context,
            "/alerts/{incident_id:path}",
            "alert.html",
            view_incident,
            incident=lambda visit, models: fetch_part(models.api.read(Alert, f"alerts/{segment(_id(visit))}")),
            changes=lambda visit, models: fetch_part(incident_changes(models.analytics, _id(visit))),
        ),
    ]


def _id(visit: Visit) -> str:
    return visit.path_params["incident_id"]


def _past(visit: Visit, models: ReadModels) -> Awaitable[PagePart[tuple[Incident, ...]]]:
    limit = MAX_SAVED if _takes_all(visit) else PAGE_ROWS
    stored = incidents(
        models.analytics, visit.time_range.window, **_filters_of(visit), before=_before(visit), limit=limit + 1
    )
    return fetch_part(stored)


def view(
    visit: Visit,
    unresolved: PagePart[AlertList],
    undelivered: PagePart[UndeliveredList],
    past: PagePart[tuple[Incident, ...]],
) -> dict[str, Any]:
    """The values of the page of all alerts."""
    takes_all = _takes_all(visit)
    stored = list(past.value or ())
    open_incidents = unresolved.value.alerts if unresolved.value else ()
    given_up = undelivered.value.undelivered if undelivered.value else ()
    history = stored[: MAX_SAVED if takes_all else PAGE_ROWS]
    older = None
    if not takes_all and len(stored) > PAGE_ROWS:
        cursor = cursor_of(stored[PAGE_ROWS - 1])
        older = visit.address.link("history", before=f"{cursor.opened_ms}-{cursor.incident_id}", more_after="")
    return {
        "concerned_agents": concerned_agents,
        "open_table": PageTable(visit.address, "now", "Open incidents", INCIDENTS, open_incidents),
        "undelivered_table": PageTable(visit.address, "undelivered", "Undelivered alerts", UNDELIVERED, given_up),
        "not_replayed": any(not alert.replayed for alert in given_up),
        "past_table": PageTable(
            visit.address, "history", "Incidents", PAST, history, max_rows=PAGE_ROWS, filters=FILTERS
        ),
        "older": older,
        "chosen": _filters_of(visit),
        "statuses": STATUSES,
        "events": EVENTS,
        "no_channel": NO_CHANNEL,
    }


def view_incident(
    visit: Visit, incident: PagePart[Alert], changes: PagePart[tuple[Alert, ...]]
) -> dict[str, Any] | NotFound:
    """The values of the page of an incident."""
    incident_id = _id(visit)
    newest = incident.value or (changes.value[-1] if changes.value else None)
    if newest is None and not changes.problem:
        return NotFound("Incident not found", incident.problem or f"There is no incident {incident_id!r}.")
    return {
        "incident_id": incident.value.incident_id if incident.value else incident_id,
        # An incident that was resolved long ago is only in ClickHouse, and allows no actions.
        "allows_actions": incident.value is not None,
        "newest": newest,
        "severity": newest and severity_now(newest),
        "agents": concerned_agents(newest) if newest else (),
        "execution_id": _text_of(newest.payload, "execution_id") if newest else None,
        "budget": newest and budget_of(newest),
    }


async def replay(request: Request) -> Response:
    """POST: retries undelivered alerts."""
    session, fields = await read_action(request)
    dead_letter_id = fields.get("dead_letter_id")
    after = fields.get("after")
    if any(value and not whole_number(value) for value in (dead_letter_id, after)):
        # A request without the number would retry all of them.
        session.notify("The action failed: a dead letter is identified by its number, which is shown below.", "bad")
        return back_to("/alerts")
    body: dict[str, object] = {"reason": reason_of(fields)}
    if dead_letter_id:
        body["dead_letter_id"] = whole_number(dead_letter_id)
    elif after:
        body["after"] = whole_number(after)
    replayed = await act(session, AlertReplays, "alerts/replay", body)
    if replayed is None:
        return back_to("/alerts")
    session.notify(_replay_notice(replayed))
    return back_to("/alerts", {"more_after": str(replayed.continue_after) if replayed.continue_after else None})


def _body(fields: Fields) -> dict[str, str]:
    return {"incident_id": fields.get("incident_id")}


def _outcome(change: str) -> Callable[[Fields, dict[str, Any]], str]:
    unchanged_text = "Another operator was faster: nothing was changed. The current state is below."
    return lambda _, result: unchanged_text if "unchanged" in result else f"The incident {change}."


def _back(fields: Fields) -> str:
    return f"/alerts/{segment(fields.get('incident_id'))}" if fields.get("from") == "one" else "/alerts"


def _takes_all(visit: Visit) -> bool:
    """Returns whether the history is sorted, filtered or saved, which takes all of its pages."""
    return not visit.address.query.keys().isdisjoint(("csv", "history.sort", "history.find"))


def _filters_of(visit: Visit) -> dict[str, str]:
    """The filters of the history, without unknown statuses and events."""
    status = visit.get("status")
    event = visit.get("event")
    return {
        "status": status if status in STATUSES else "",
        "event": event if event in EVENTS else "",
        "agent": visit.get("agent"),
    }


def _before(visit: Visit) -> IncidentCursor | None:
    """The position where a later page of the history begins; None for the first page."""
    moment, _, incident_id = visit.get("before").partition("-")
    if not moment.isdecimal() or len(moment) > 15:
        return None
    return IncidentCursor(int(moment), incident_id)


def _replay_notice(replayed: AlertReplays) -> str:
    """Describes the result of a replay."""
    by_channel = ", ".join(f"{count:,} by {channel}" for channel, count in replayed.channels.items())
    parts = [f"{replayed.replayed:,} will be retried{f' ({by_channel})' if by_channel else ''}"]
    if replayed.already:
        parts.append(f"{replayed.already:,} had been retried before")
    if replayed.skipped:
        parts.append(f"{replayed.skipped:,} are of channels that are no longer configured")
    continuation = " There are more: continue below." if replayed.continue_after else ""
    return f"{'; '.join(parts)}.{continuation}"


def _text_of(payload: object, name: str) -> str | None:
    if not isinstance(payload, Mapping):
        return None
    value: object = payload.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else None
