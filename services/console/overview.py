"""The first page: is it healthy, who spends what, what fails and why, what was wasted."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import breakdown, costs, overview
from breakwater.analytics.breakdown import refusals
from breakwater.analytics.costs import Spender, SpendLine
from breakwater.contracts.api import ServiceQueue
from breakwater.contracts.subjects import decode_token
from services.console import tiles
from services.console.history import causes, drawn, holding
from services.console.live import live
from services.console.overall_health import behind, overall_health
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.time_range import TimeRange, time_range_of
from services.console.words import segment

SHOWN = 10
"""Lines of a table."""

_SPENDERS: tuple[Spender, ...] = get_args(Spender)
_CHANNEL = "alerter-channel-"
_READS = {
    "breaker": "counts failures",
    "budget": "counts what calls cost",
    "alerter": "hears of breakers, budgets and guards",
    "alerter-executions": "watches how executions end",
    "alerter-dead-letters": "hears of dead letters",
    "alerter-again": "tries alerts again",
    "sink-events": "stores what happened",
    "sink-alerts": "stores incidents",
}


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, time_range, by = session_of(request), time_range_of(request, context.now(), context.zone), _by(request)
        database, window = context.analytics, time_range.window
        now, held, (totals, history, errors, waste, providers, spenders) = await asyncio.gather(
            live(context.api, session.key),
            fetched(refusals(database, window)),
            asyncio.gather(
                fetched(overview.totals(database, window)),
                fetched(overview.history(database, window)),
                fetched(breakdown.errors(database, window, limit=SHOWN)),
                fetched(costs.waste(database, window)),
                fetched(breakdown.providers(database, window)),
                fetched(costs.spend_by(database, window, by, limit=SHOWN)),
            ),
        )
        return context.pages.render(
            request,
            "overview.html",
            time_range=time_range,
            live=now,
            totals=totals,
            health=overall_health(totals.value, now, time_range.words, time_range.executions(status="dead_lettered")),
            happened=[] if totals.value is None else tiles.of_history(totals.value, time_range),
            now=tiles.of_now(now),
            drawn=None if history.value is None else drawn(history.value, window),
            history=history,
            errors=errors,
            held=held,
            holding=holding,
            waste=waste,
            unknown_waste=None if totals.value is None else totals.value.unknown_waste,
            causes=causes,
            providers=providers,
            spenders=spenders,
            by=by,
            tabs=[(one, _tab(request, one), one == by) for one in _SPENDERS],
            address=partial(_address, time_range, by),
            behind=behind,
            reads=_reads,
            shown=SHOWN,
        )

    return [Route("/", show, methods=["GET"])]


def _by(request: Request) -> Spender:
    wanted = request.query_params.get("by")
    return wanted if wanted in _SPENDERS else "agent"


def _tab(request: Request, by: Spender) -> str:
    return f"/?{urlencode(dict(request.query_params) | {'by': by})}#spend"


def _address(time_range: TimeRange, by: Spender, line: SpendLine) -> str | None:
    """Where to see more of who spends; None for what has no name."""
    if line.key is None:
        return None
    return f"/agents/{segment(line.key)}" if by == "agent" else time_range.executions(**{by: line.key})


def _reads(queue: ServiceQueue) -> str:
    """What a service does with what it reads, in words."""
    if queue.consumer.startswith(_CHANNEL):
        return f"sends alerts to the channel {decode_token(queue.consumer.removeprefix(_CHANNEL))}"
    return _READS.get(queue.consumer, f"reads {queue.stream}")
