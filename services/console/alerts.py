"""Alerts: what is not over, what was, how an incident came to be, and looking after it; and what nobody was told of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics.incidents import Incident, Place, incident_changes, incidents, place_of
from breakwater.analytics.window import Window
from breakwater.contracts.alerts import Alert, AlertEvent, IncidentStatus
from breakwater.contracts.api import AlertReplays, UndeliveredAlert
from breakwater.contracts.types import Event
from services.console.auth import acting
from services.console.door import DoorError, SignedOut
from services.console.operator_actions import back, done, whole, why
from services.console.pages import Fetched, PageContext, fetched
from services.console.sessions import session_of
from services.console.time_range import WINDOWS, window_links, window_of
from services.console.words import segment

PAGE = 50
STATUSES: tuple[IncidentStatus, ...] = get_args(IncidentStatus)
EVENTS: tuple[AlertEvent, ...] = get_args(AlertEvent)


class _Alerts(Event):
    """What the interface tells of incidents."""

    alerts: tuple[Alert, ...]
    more: bool


class _Undelivered(Event):
    """What the interface tells of alerts that did not arrive."""

    undelivered: tuple[UndeliveredAlert, ...]
    more: bool


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, window = session_of(request), window_of(request, "7d")
        chosen = _chosen(request)
        known, lost, before = await asyncio.gather(
            fetched(context.api.read(_Alerts, session.key, "alerts", {"limit": 200})),
            fetched(context.api.read(_Undelivered, session.key, "alerts/undelivered", {"limit": 50})),
            fetched(
                incidents(
                    context.analytics,
                    Window.last(WINDOWS[window], context.now()),
                    **chosen,
                    before=_before(request),
                    limit=PAGE + 1,
                )
            ),
        )
        return context.pages.render(
            request,
            "alerts.html",
            window=window,
            windows=window_links(request, window),
            known=known,
            lost=lost,
            again=[one for one in lost.value.undelivered if not one.replayed] if lost.value else [],
            past=before,
            rows=(before.value or ())[:PAGE],
            older=_older(request, before),
            chosen=chosen,
            statuses=STATUSES,
            events=EVENTS,
        )

    async def show_one(request: Request) -> Response:
        session, incident_id = session_of(request), request.path_params["incident_id"]
        known, changes = await asyncio.gather(
            fetched(context.api.read(Alert, session.key, f"alerts/{segment(incident_id)}")),
            fetched(incident_changes(context.analytics, incident_id)),
        )
        newest = known.value or (changes.value[-1] if changes.value else None)
        if newest is None and not changes.problem:
            text = known.problem or f"No incident {incident_id!r} is known."
            return context.pages.plain(request, 404, "There is no such incident", text)
        return context.pages.render(
            request,
            "alert.html",
            incident_id=known.value.incident_id if known.value else incident_id,
            # One that is over for long is kept in ClickHouse only, and nothing can be done about it.
            live=known.value is not None,
            known=known,
            newest=newest,
            changes=changes,
            execution_id=_text_of(newest.payload, "execution_id") if newest else None,
            budget=_budget_of(newest.payload) if newest and newest.event.startswith("budget") else None,
        )

    async def acknowledge(request: Request) -> Response:
        return await _act(request, "ack", "is acknowledged: you look after it, and nobody is reminded any more")

    async def resolve(request: Request) -> Response:
        return await _act(request, "resolve", "is resolved")

    async def _act(request: Request, action: Literal["ack", "resolve"], outcome: str) -> Response:
        session, fields = await acting(request)
        incident_id = fields.get("incident_id")
        body = {"incident_id": incident_id, "reason": why(fields.get("reason"))}
        await done(
            session,
            context.api.post(session.key, f"alerts/{action}", body),
            f"The incident {outcome}.",
            "Somebody was quicker: nothing was changed. Below is how it is.",
        )
        if fields.get("from") == "one":
            return back(f"/alerts/{segment(incident_id)}")
        return back("/alerts")

    async def replay(request: Request) -> Response:
        session, fields = await acting(request)
        number, after = fields.get("dead_letter_id"), fields.get("after")
        if any(given and not whole(given) for given in (number, after)):
            # Without it, all of them would be tried again.
            session.notify("This was not done: a dead letter is named by its number, which is shown below.", "bad")
            return back("/alerts")
        body: dict[str, object] = {"reason": why(fields.get("reason"))}
        if number:
            body["dead_letter_id"] = whole(number)
        elif after:
            body["after"] = whole(after)
        try:
            told = AlertReplays.model_validate(await context.api.post(session.key, "alerts/replay", body))
        except SignedOut:
            raise
        except DoorError as error:
            session.notify(f"This was not done: {error.message}", "bad")
            return back("/alerts")
        session.notify(_told(told))
        return back("/alerts", {"more_after": str(told.continue_after) if told.continue_after else None})

    return [
        Route("/alerts", show, methods=["GET"]),
        Route("/alerts/ack", acknowledge, methods=["POST"]),
        Route("/alerts/resolve", resolve, methods=["POST"]),
        Route("/alerts/replay", replay, methods=["POST"]),
        Route("/alerts/{incident_id:path}", show_one, methods=["GET"]),
    ]


def _chosen(request: Request) -> dict[str, str]:
    """What the history is filtered by; what is no status or event of ours is left out."""
    query = request.query_params
    status, event = query.get("status", ""), query.get("event", "")
    return {
        "status": status if status in STATUSES else "",
        "event": event if event in EVENTS else "",
        "agent": query.get("agent", "").strip(),
    }


def _before(request: Request) -> Place | None:
    """Where a later page of the history begins."""
    moment, _, incident_id = request.query_params.get("before", "").partition("-")
    if not moment.isdecimal() or len(moment) > 15:
        return None
    return Place(int(moment), incident_id)


def _older(request: Request, past: Fetched[tuple[Incident, ...]]) -> str | None:
    """The address of the next page of the history; None where there is none."""
    if past.value is None or len(past.value) <= PAGE:
        return None
    place = place_of(past.value[PAGE - 1])
    query = {name: value for name, value in request.query_params.items() if name not in ("before", "more_after")}
    return f"/alerts?{urlencode({**query, 'before': f'{place.opened_ms}-{place.incident_id}'})}#history"


def _told(replayed: AlertReplays) -> str:
    """What came of a replay, in words."""
    by = ", ".join(f"{count:,} by {channel}" for channel, count in replayed.channels.items())
    parts = [f"{replayed.replayed:,} will be tried again{f' ({by})' if by else ''}"]
    if replayed.already:
        parts.append(f"{replayed.already:,} were tried again before")
    if replayed.skipped:
        parts.append(f"{replayed.skipped:,} are of channels that the config has no more")
    more = " There are more: go on below." if replayed.continue_after else ""
    return f"{'; '.join(parts)}.{more}"


def _budget_of(payload: object) -> str | None:
    """The name of the budget that an incident is of."""
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
