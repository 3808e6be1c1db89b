"""Alerts: incidents that are open, past ones, the changes of each, acting on them; and undelivered alerts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.alerts.contract import Alert, AlertEvent, AlertList, AlertReplays, IncidentStatus, UndeliveredList
from breakwater.alerts.views import INCIDENTS, NO_CHANNEL, UNDELIVERED
from breakwater.identity.pages.operator_actions import Fields, act, action, back_to, reason_of, submitted, whole_number
from breakwater.identity.pages.pages import Fetched, PageContext, fetched
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment
from breakwater.records.events import Incident, IncidentCursor, cursor_of, incident_changes, incidents

PAGE = 50
MAX_SAVED = 10_000
"""Incidents that are sorted, filtered, or saved."""

STATUSES: tuple[IncidentStatus, ...] = get_args(IncidentStatus)
EVENTS: tuple[AlertEvent, ...] = get_args(AlertEvent)

FILTERS = ("status", "event", "agent", "before")
"""Parameters that another filter of the history replaces."""

PAST: tuple[Column[Any], ...] = (
    *(one for one in INCIDENTS if one.key != "since"),
    Column("started", lambda one: one.opened_at, "time"),
    Column("lasted", lambda one: one.duration_ms, "duration", name="lasted_ms", missing="ongoing"),
    Column(
        "acknowledged", lambda one: one.time_to_acknowledge_ms, "duration", name="acknowledged_after_ms", page=False
    ),
)


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
            known=lambda _, models: fetched(models.api.read(AlertList, "alerts", {"limit": 200})),
            undelivered=lambda _, models: fetched(
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
            view_one,
            known=lambda visit, models: fetched(models.api.read(Alert, f"alerts/{segment(_id(visit))}")),
            changes=lambda visit, models: fetched(incident_changes(models.analytics, _id(visit))),
        ),
    ]


def _id(visit: Visit) -> str:
    return visit.path_params["incident_id"]


def _past(visit: Visit, models: ReadModels) -> Awaitable[Fetched[tuple[Incident, ...]]]:
    window, limit = visit.time_range.window, MAX_SAVED if _takes_all(visit) else PAGE
    return fetched(incidents(models.analytics, window, **_chosen(visit), before=_before(visit), limit=limit + 1))


def view(
    visit: Visit,
    known: Fetched[AlertList],
    undelivered: Fetched[UndeliveredList],
    past: Fetched[tuple[Incident, ...]],
) -> dict[str, Any]:
    """The page of all alerts."""
    takes_all, stored = _takes_all(visit), list(past.value or ())
    is_open = known.value.alerts if known.value else ()
    given_up = undelivered.value.undelivered if undelivered.value else ()
    history = stored[: MAX_SAVED if takes_all else PAGE]
    older = None
    if not takes_all and len(stored) > PAGE:
        place = cursor_of(stored[PAGE - 1])
        older = visit.address.link("history", before=f"{place.opened_ms}-{place.incident_id}", more_after="")
    return {
        "open_table": PageTable(visit.address, "now", "Open incidents", INCIDENTS, is_open),
        "undelivered_table": PageTable(visit.address, "undelivered", "Undelivered alerts", UNDELIVERED, given_up),
        "not_replayed": any(not one.replayed for one in given_up),
        "past_table": PageTable(visit.address, "history", "Incidents", PAST, history, most=PAGE, filters=FILTERS),
        "older": older,
        "chosen": _chosen(visit),
        "statuses": STATUSES,
        "events": EVENTS,
        "no_channel": NO_CHANNEL,
    }


def view_one(visit: Visit, known: Fetched[Alert], changes: Fetched[tuple[Alert, ...]]) -> dict[str, Any] | NotFound:
    """The page of one incident."""
    incident_id = _id(visit)
    newest = known.value or (changes.value[-1] if changes.value else None)
    if newest is None and not changes.problem:
        return NotFound("Incident not found", known.problem or f"There is no incident {incident_id!r}.")
    return {
        "incident_id": known.value.incident_id if known.value else incident_id,
        # One that was resolved long ago is in ClickHouse only, and can't be acted on.
        "live": known.value is not None,
        "newest": newest,
        "execution_id": _text_of(newest.payload, "execution_id") if newest else None,
        "budget": _budget_of(newest.payload) if newest and newest.event.startswith("budget") else None,
    }


async def replay(request: Request) -> Response:
    """POST: retries undelivered alerts."""
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
    session.notify(_replayed(replayed))
    return back_to("/alerts", {"more_after": str(replayed.continue_after) if replayed.continue_after else None})


def _body(fields: Fields) -> dict[str, str]:
    return {"incident_id": fields.get("incident_id")}


def _outcome(done: str) -> Callable[[Fields, dict[str, Any]], str]:
    already = "Another operator was faster: nothing was changed. The current state is below."
    return lambda _, result: already if "unchanged" in result else f"The incident {done}."


def _back(fields: Fields) -> str:
    return f"/alerts/{segment(fields.get('incident_id'))}" if fields.get("from") == "one" else "/alerts"


def _takes_all(visit: Visit) -> bool:
    """True if the history is sorted, filtered or saved, which takes all of its pages."""
    return not visit.address.query.keys().isdisjoint(("csv", "history.sort", "history.find"))


def _chosen(visit: Visit) -> dict[str, str]:
    """The filters of the history; unknown statuses and events are ignored."""
    status, event = visit.get("status"), visit.get("event")
    return {
        "status": status if status in STATUSES else "",
        "event": event if event in EVENTS else "",
        "agent": visit.get("agent"),
    }


def _before(visit: Visit) -> IncidentCursor | None:
    """The place where a later page of the history begins."""
    moment, _, incident_id = visit.get("before").partition("-")
    if not moment.isdecimal() or len(moment) > 15:
        return None
    return IncidentCursor(int(moment), incident_id)


def _replayed(replayed: AlertReplays) -> str:
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
