"""One agent: how it stands, what it spent and wasted, whether trying again helped, what it may spend yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import breakdown, costs, overview, search
from breakwater.analytics.breakdown import refusals
from breakwater.analytics.costs import RetryFigures
from breakwater.analytics.overview import WindowTotals
from breakwater.analytics.search import Filters
from breakwater.contracts.api import AgentHealth, AgentQueue, BreakerStatus, Queues
from breakwater.contracts.types import is_identifier
from services.console import tiles, words
from services.console.door import DoorError
from services.console.history import causes, drawn, holding
from services.console.live import Breakers, Budgets, Incidents, queue_of
from services.console.overall_health import spent
from services.console.pages import Fetched, PageContext, fetched
from services.console.sessions import session_of
from services.console.tiles import Colour, Tile
from services.console.time_range import time_range_of

T = TypeVar("T")

LATEST = 8
SHOWN = 20
"""Lines of a table."""


def routes(context: PageContext) -> list[Route]:
    """The address of the page."""

    async def show(request: Request) -> Response:
        session, time_range, name = (
            session_of(request),
            time_range_of(request, context.now(), context.zone),
            request.path_params["name"],
        )
        if not is_identifier(name):
            raise HTTPException(404)
        door, key, database, window = context.api, session.key, context.analytics, time_range.window
        of_agent = Filters(agent=name, since=window.start, until=window.end)
        now, past, calls = await asyncio.gather(
            asyncio.gather(
                fetched(door.read(list[AgentHealth], key, "agents")),
                fetched(door.read(Breakers, key, "breakers")),
                fetched(
                    _if_known(door.read(Budgets, key, "budgets", {"agent": name}), Budgets(filled=True, budgets=()))
                ),
                fetched(_if_known(door.read(Incidents, key, "alerts", {"agent": name}), Incidents(alerts=()))),
                fetched(door.read(Queues, key, "queues")),
            ),
            asyncio.gather(
                fetched(overview.totals(database, window, agent=name)),
                fetched(overview.history(database, window, agent=name)),
                fetched(costs.waste(database, window, agent=name)),
                fetched(search.search(database, of_agent, limit=LATEST)),
            ),
            asyncio.gather(
                fetched(breakdown.errors(database, window, agent=name, limit=SHOWN)),
                fetched(costs.retries(database, window, agent=name)),
                fetched(refusals(database, window, agent=name)),
            ),
        )
        healths, breakers, budgets, incidents, queues = now
        totals, history, waste, latest = past
        errors, retries, held = calls
        health = next((one for one in healths.value or () if one.agent_id == name), None)
        queue = queue_of(queues.value, name)
        known = health is not None or healths.value is None or totals.value is None or _did(totals.value)
        return context.pages.render(
            request,
            "agent.html",
            status=200 if known else 404,
            time_range=time_range,
            name=name,
            known=known,
            health=health,
            configured=healths.value is not None,
            reasons=_reasons(breakers, name),
            happened=[] if totals.value is None else [*tiles.of_history(totals.value, time_range, name)],
            now=_now(name, queue, incidents, budgets, totals.value),
            problems=list(dict.fromkeys(one.problem for one in (*now, *past, *calls) if one.problem is not None)),
            drawn=None if history.value is None else drawn(history.value, window),
            errors=errors,
            waste=waste,
            all_waste=sum(line.cost for line in waste.value or ()),
            unknown_waste=None if totals.value is None else totals.value.unknown_waste,
            causes=causes,
            retries=retries.value,
            helped=None if retries.value is None else helped(retries.value, time_range.words),
            held=held,
            holding=holding,
            budgets=[one for one in budgets.value.budgets if one.agent == name] if budgets.value else None,
            spent=spent,
            latest=latest,
        )

    return [Route("/agents/{name:path}", show, methods=["GET"])]


def helped(figures: RetryFigures, when: str) -> tuple[str, ...]:
    """Whether trying again was worth it, in sentences.

    Args:
        figures: what happened.
        when: such as `in the last 24h`.
    """
    if not figures.retried and not figures.fell_back and not figures.untold:
        return (f"Nothing was tried again {when}.",)
    said: list[str] = []
    if figures.retried:
        outcome = _outcome(figures.saved, figures.retried, "tried again", figures.rate)
        cost = words.short_money(figures.cost)
        said.append(f"{_verdict('Retrying', figures.rate)}: {outcome}. The retries cost {cost}.")
    if figures.fell_back:
        outcome = _outcome(figures.saved_by_fallback, figures.fell_back, "fell back", figures.fallback_rate)
        said.append(f"{_verdict('Falling back to another model', figures.fallback_rate)}: {outcome}.")
    if figures.untold == 1:
        said.append("One execution that ended before the upgrade tells nothing of it.")
    elif figures.untold:
        said.append(f"{figures.untold:,} executions that ended before the upgrade tell nothing of it.")
    return tuple(said)


def _verdict(what: str, rate: float | None) -> str:
    share = rate or 0.0
    return f"{what} {'helped' if share >= 0.5 else 'helped now and then' if share > 0 else 'did not help'}"


def _outcome(saved: int, tried: int, what: str, rate: float | None) -> str:
    if tried == 1:
        return f"the one execution that {what} {'succeeded' if saved else 'failed'}"
    return f"{saved:,} of {tried:,} executions that {what} succeeded ({words.percent(rate)})"


def _did(totals: WindowTotals) -> bool:
    return bool(totals.executions or totals.calls or totals.short_circuits)


async def _if_known(asked: Awaitable[T], nothing: T) -> T:
    """What is told of an agent; `nothing` where the config has none of that name. Raises DoorError: anything else."""
    try:
        return await asked
    except DoorError as error:
        if error.code != "unknown_agent":
            raise
        return nothing


def _reasons(breakers: Fetched[Breakers], name: str) -> dict[str, BreakerStatus]:
    """The agent's own breakers, by model."""
    told = breakers.value
    return {} if told is None else {one.model: one for one in told.breakers if one.agent == name}


def _now(
    name: str,
    queue: AgentQueue | None,
    incidents: Fetched[Incidents],
    budgets: Fetched[Budgets],
    totals: WindowTotals | None,
) -> list[Tile]:
    shown = [_jobs(queue), tiles.incidents(incidents.value)]
    if budgets.value is not None:
        capped = [one for one in budgets.value.budgets if one.agent == name and one.limit]
        over = [one for one in capped if spent(one)]
        colour: Colour = "" if not over else "bad" if any(one.enforcement == "hard" for one in over) else "warn"
        note = f"of {len(capped)}" if capped else "it has none of its own"
        shown.append(Tile("Spent budgets", str(len(over)), note, "#budgets", colour))
    if totals is not None:
        shown.append(Tile("Retries", f"{totals.retries:,}", f"{totals.fallbacks:,} fallbacks", "#retries"))
    return shown


def _jobs(queue: AgentQueue | None) -> Tile:
    if queue is None or queue.waiting is None:
        return Tile(
            "Jobs waiting now", "–", "it has no queue" if queue else "can't be told now", "/agents?sort=waiting"
        )
    idle = queue.waiting and not queue.in_work
    note = f"{queue.in_work:,} in work, of {queue.concurrency:,} at once"
    return Tile("Jobs waiting now", f"{queue.waiting:,}", note, "/agents?sort=waiting", "warn" if idle else "")
