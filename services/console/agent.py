"""One agent: its health, spend and waste, the success of its retries, its budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple, TypeVar

from starlette.exceptions import HTTPException
from starlette.routing import Route

from breakwater.analytics import figures
from breakwater.analytics.figures import (
    ErrorLine,
    History,
    RefusalLine,
    RetryFigures,
    StreamLine,
    WasteLine,
    WindowTotals,
)
from breakwater.analytics.search import Filters, Page, search
from breakwater.client import ApiError
from breakwater.contracts.alerts import AlertList
from breakwater.contracts.breakers import AgentHealth, BreakerList
from breakwater.contracts.budgets import BudgetList
from breakwater.contracts.http import AgentQueue, Queues
from breakwater.contracts.types import is_identifier
from breakwater.policy.formats import counted
from breakwater.views.executions import COLUMNS
from services.console import tiles, words
from services.console.history import history_charts
from services.console.overall_health import queue_of, spent
from services.console.pages import Fetched, PageContext, fetched, problems_of
from services.console.tiles import Tile
from services.console.visits import ReadModels, View, Visit, page

T = TypeVar("T")

LATEST = 8
SHOWN = 20
"""Rows of a table."""

LATEST_COLUMNS = [one for one in COLUMNS if one.key not in ("agent", "total_tokens", "error")]


class AgentModels(NamedTuple):
    """The read models of an agent's page."""

    healths: Fetched[list[AgentHealth]]
    breakers: Fetched[BreakerList]
    budgets: Fetched[BudgetList]
    incidents: Fetched[AlertList]
    queues: Fetched[Queues]
    history: Fetched[History]
    waste: Fetched[tuple[WasteLine, ...]]
    latest: Fetched[Page]
    errors: Fetched[tuple[ErrorLine, ...]]
    retries: Fetched[RetryFigures]
    held: Fetched[tuple[RefusalLine, ...]]
    streams: Fetched[tuple[StreamLine, ...]]


def routes(context: PageContext) -> list[Route]:
    """The route of the page."""
    return [page(context, "/agents/{name:path}", "agent.html", read, view)]


async def read(visit: Visit, models: ReadModels) -> tuple[AgentModels]:
    """All that is known of the agent, now and in the time range."""
    time_range, name = visit.time_range(), visit.path_params["name"]
    if not is_identifier(name):
        raise HTTPException(404)
    api, database, window, of_name = models.api, models.analytics, time_range.window, {"agent": name}
    summed = partial(visit.part, slow=time_range.is_long)
    now, past, calls = await asyncio.gather(
        asyncio.gather(
            fetched(api.read(list[AgentHealth], "agents")),
            fetched(api.read(BreakerList, "breakers")),
            fetched(_if_configured(api.read(BudgetList, "budgets", of_name), BudgetList(filled=True, budgets=()))),
            fetched(_if_configured(api.read(AlertList, "alerts", of_name), AlertList(alerts=(), more=False))),
            fetched(api.read(Queues, "queues")),
        ),
        asyncio.gather(
            summed(figures.history(database, window, agent=name)),
            summed(figures.waste(database, window, agent=name)),
            fetched(search(database, Filters(agent=name, since=window.start, until=window.end), limit=LATEST)),
        ),
        asyncio.gather(
            summed(figures.errors(database, window, agent=name, limit=SHOWN)),
            summed(figures.retries(database, window, agent=name)),
            summed(figures.refusals(database, window, agent=name)),
            summed(figures.streams(database, window, agent=name)),
        ),
    )
    return (AgentModels(*now, *past, *calls),)


def view(visit: Visit, found: AgentModels) -> View:
    """The page of the agent; with status 404 if nothing is known of it."""
    time_range, name = visit.time_range(), visit.path_params["name"]
    healths, breakers, budgets = found.healths.value, found.breakers.value, found.budgets.value
    history, retries = found.history, found.retries.value
    totals = history.value and history.value.totals
    health = next((one for one in healths or () if one.agent_id == name), None)
    own_budgets = [one for one in budgets.budgets if one.agent == name] if budgets else None
    present_tiles = [_jobs(queue_of(found.queues.value, name)), tiles.incidents(found.incidents.value)]
    if own_budgets is not None:
        present_tiles.append(tiles.spent_budgets(own_budgets, "#budgets", "it has none of its own"))
    if totals is not None:
        present_tiles.append(Tile("Retries", f"{totals.retries:,}", counted(totals.fallbacks, "fallback"), "#retries"))
    known = health is not None or healths is None or totals is None or _did_something(totals)
    return {
        "status": 200 if known else 404,
        "time_range": time_range,
        "name": name,
        "known": known,
        "health": health,
        "configured": healths is not None,
        "breakers": {one.model: one for one in breakers.breakers if one.agent == name} if breakers else {},
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range, name),
        "present_tiles": present_tiles,
        "problems": problems_of(*found),
        "pending": history.pending,
        "history": history,
        "history_charts": history.value and history_charts(history.value.steps, time_range.window, name),
        "errors": found.errors,
        "waste": found.waste,
        "all_waste": sum(line.cost for line in found.waste.value or ()),
        "unknown_waste": totals and totals.unknown_waste,
        "retries": retries,
        "helped": None if retries is None else helped(retries, time_range.words),
        "held": found.held,
        "streams": found.streams.value,
        "budgets": own_budgets,
        "spent": spent,
        "latest": found.latest,
        "latest_columns": LATEST_COLUMNS,
    }


def helped(tried: RetryFigures, when: str) -> tuple[str, ...]:
    """The benefit of retrying, in sentences.

    Args:
        tried: the figures of retries.
        when: such as `in the last 24h`.
    """
    if not tried.retried and not tried.fell_back:
        return (f"Nothing was retried {when}.",)
    sentences: list[str] = []
    if tried.retried:
        outcome = _outcome(tried.saved, tried.retried, "were retried", tried.rate)
        cost = words.short_money(tried.cost)
        sentences.append(f"{_verdict('Retrying', tried.rate)}: {outcome}. The retries cost {cost}.")
    if tried.fell_back:
        outcome = _outcome(tried.saved_by_fallback, tried.fell_back, "fell back", tried.fallback_rate)
        sentences.append(f"{_verdict('Falling back to another model', tried.fallback_rate)}: {outcome}.")
    return tuple(sentences)


def _verdict(what: str, rate: float | None) -> str:
    share = rate or 0.0
    return f"{what} {'helped' if share >= 0.5 else 'sometimes helped' if share > 0 else 'did not help'}"


def _outcome(saved: int, tried: int, what: str, rate: float | None) -> str:
    if tried == 1:
        return f"the one execution that {what.replace('were', 'was')} {'succeeded' if saved else 'failed'}"
    return f"{saved:,} of {tried:,} executions that {what} succeeded ({words.percent(rate)})"


def _did_something(totals: WindowTotals) -> bool:
    return bool(totals.executions or totals.calls or totals.short_circuits)


async def _if_configured(asked: Awaitable[T], nothing: T) -> T:
    """The response for an agent; `nothing` if no agent of that name is configured. Raises ApiError otherwise."""
    try:
        return await asked
    except ApiError as error:
        if error.code != "unknown_agent":
            raise
        return nothing


def _jobs(queue: AgentQueue | None) -> Tile:
    label, href = "Jobs waiting now", "/agents?sort=waiting"
    if queue is None:
        return tiles.unknown(label, href)
    if queue.waiting is None:
        return Tile(label, "–", "it has no queue", href)
    note = f"{queue.in_progress:,} running, of {queue.concurrency:,} at once"
    return Tile(label, f"{queue.waiting:,}", note, href, "warn" if queue.waiting and not queue.in_progress else "")
