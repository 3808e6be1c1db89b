"""The first page: overall health, spend, failures with their causes, and waste."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import get_args

from starlette.routing import Route

from breakwater.analytics import figures
from breakwater.analytics.figures import ErrorLine, History, ProviderLine, RefusalLine, Spender, SpendLine, WasteLine
from breakwater.bus import topology
from breakwater.contracts.http import ServiceQueue
from breakwater.contracts.subjects import decode_token
from services.console import tiles
from services.console.history import history_charts
from services.console.overall_health import Live, behind, live, overall_health
from services.console.pages import Fetched, PageContext
from services.console.time_range import TimeRange
from services.console.visits import ReadModels, View, Visit, page
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


@dataclass(frozen=True, slots=True)
class RangeFigures:
    """The figures of the page's time range."""

    history: Fetched[History]
    held: Fetched[tuple[RefusalLine, ...]]
    errors: Fetched[tuple[ErrorLine, ...]]
    waste: Fetched[tuple[WasteLine, ...]]
    providers: Fetched[tuple[ProviderLine, ...]]
    spenders: Fetched[tuple[SpendLine, ...]]


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""
    return [page(context, "/", "overview.html", read, view)]


async def read(visit: Visit, models: ReadModels) -> tuple[Live, RangeFigures]:
    """The state now, and the figures of the time range."""
    time_range = visit.time_range()
    database, window, summed = models.analytics, time_range.window, partial(visit.part, slow=time_range.is_long)
    now, found = await asyncio.gather(
        live(models.api),
        asyncio.gather(
            summed(figures.history(database, window)),
            summed(figures.refusals(database, window)),
            summed(figures.errors(database, window, limit=CAUSES)),
            summed(figures.waste(database, window)),
            summed(figures.providers(database, window)),
            summed(figures.spend_by(database, window, _spender(visit), limit=SHOWN)),
        ),
    )
    return now, RangeFigures(*found)


def view(visit: Visit, now: Live, found: RangeFigures) -> View:
    """The sentence, the tiles and the charts of the page, and its tables."""
    time_range, by = visit.time_range(), _spender(visit)
    history = found.history
    totals = history.value and history.value.totals
    return {
        "time_range": time_range,
        "live": now,
        "health": overall_health(totals, now, time_range.words, time_range.executions(status="dead_lettered")),
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range),
        "present_tiles": tiles.of_now(now),
        "history_charts": history.value and history_charts(history.value.steps, time_range.window),
        "history": history,
        "held": found.held,
        "errors": found.errors,
        "waste": found.waste,
        "unknown_waste": totals and totals.unknown_waste,
        "providers": found.providers,
        "spenders": found.spenders,
        "by": by,
        "tabs": [(one, visit.address.link("spend", by=one), one == by) for one in _SPENDERS],
        "address": partial(_address, time_range, by),
        "behind": behind,
        "late": [one for one in now.queues.value.services if behind(one)] if now.queues.value else [],
        "task_of": task_of,
        "causes": CAUSES,
        "shown": SHOWN,
    }


def _spender(visit: Visit) -> Spender:
    wanted = visit.get("by")
    return wanted if wanted in _SPENDERS else "agent"


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
