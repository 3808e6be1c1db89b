"""The first page: overall health, spend, failures with their causes, and waste."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import figures
from breakwater.analytics.figures import History, Spender, SpendLine
from breakwater.bus import topology
from breakwater.contracts.http import ServiceQueue
from breakwater.contracts.subjects import decode_token
from services.console import tiles
from services.console.history import history_charts
from services.console.overall_health import Live, behind, live, overall_health
from services.console.pages import Fetched, PageContext
from services.console.sessions import session_of
from services.console.time_range import TimeRange
from services.console.visits import visit_of
from services.console.words import segment

CAUSES, SHOWN = 3, 5
"""Rows of the tables of failures and waste, and of spenders."""

_SPENDERS: tuple[Spender, ...] = get_args(Spender)
_CHANNEL = topology.alert_consumer("x").removesuffix("x")
_TASKS = {
    "breaker": "counts failures",
    "budget": "counts what calls cost",
    topology.ALERTER_EVENTS: "raises alerts on breakers, budgets and guards",
    topology.ALERTER_EXECUTIONS: "raises alerts on how executions end",
    topology.ALERTER_DEAD_LETTERS: "raises alerts on dead letters",
    topology.ALERTER_REPLAYS: "retries alerts",
    "sink-events": "stores events",
    "sink-alerts": "stores incidents",
    "sink-audit": "stores the audit log",
}


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""

    async def show(request: Request) -> Response:
        visit = visit_of(context, request)
        time_range = visit.time_range()
        wanted = request.query_params.get("by")
        by: Spender = wanted if wanted in _SPENDERS else "agent"
        database, window = context.analytics, time_range.window
        summed = partial(visit.part, slow=time_range.is_long)
        now, held, (history, errors, waste, providers, spenders) = await asyncio.gather(
            live(session_of(request).api),
            summed(figures.refusals(database, window)),
            asyncio.gather(
                summed(figures.history(database, window)),
                summed(figures.errors(database, window, limit=CAUSES)),
                summed(figures.waste(database, window)),
                summed(figures.providers(database, window)),
                summed(figures.spend_by(database, window, by, limit=SHOWN)),
            ),
        )
        query = dict(request.query_params)
        return context.pages.render(
            request,
            "overview.html",
            **summary(time_range, now, history),
            history=history,
            errors=errors,
            held=held,
            waste=waste,
            providers=providers,
            spenders=spenders,
            by=by,
            tabs=[(one, f"/?{urlencode(query | {'by': one})}#spend", one == by) for one in _SPENDERS],
            address=partial(_address, time_range, by),
            behind=behind,
            task_of=task_of,
            causes=CAUSES,
            shown=SHOWN,
        )

    return [Route("/", show, methods=["GET"])]


def summary(time_range: TimeRange, now: Live, history: Fetched[History]) -> dict[str, Any]:
    """The sentence, the tiles and the charts of the page, from the state now and the history of a time range."""
    totals = history.value and history.value.totals
    failed = time_range.executions(status="dead_lettered")
    return {
        "time_range": time_range,
        "live": now,
        "health": overall_health(totals, now, time_range.words, failed),
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range),
        "present_tiles": tiles.of_now(now),
        "history_charts": history.value and history_charts(history.value.steps, time_range.window),
        "unknown_waste": totals and totals.unknown_waste,
        "late": [one for one in now.queues.value.services if behind(one)] if now.queues.value else [],
    }


def _address(time_range: TimeRange, by: Spender, line: SpendLine) -> str | None:
    """The page of a spender; None if it has no name."""
    if line.key is None:
        return None
    return f"/agents/{segment(line.key)}" if by == "agent" else time_range.executions(**{by: line.key})


def task_of(queue: ServiceQueue) -> str:
    """The task for which a service reads a queue, in words."""
    if queue.consumer.startswith(_CHANNEL):
        return f"delivers alerts to the channel {decode_token(queue.consumer.removeprefix(_CHANNEL))}"
    return _TASKS.get(queue.consumer, f"reads {queue.stream}")
