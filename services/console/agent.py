"""One agent: its health, what it spent and wasted, whether retrying helped, what is left of its budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import figures, search
from breakwater.analytics.figures import RetryFigures, WindowTotals
from breakwater.analytics.search import Filters
from breakwater.client import ApiError
from breakwater.contracts.alerts import AlertList
from breakwater.contracts.breakers import AgentHealth, BreakerList
from breakwater.contracts.budgets import BudgetList
from breakwater.contracts.http import AgentQueue, Queues
from breakwater.contracts.types import is_identifier
from breakwater.policy.formats import counted
from services.console import tiles, words
from services.console.history import history_charts
from services.console.overall_health import queue_of, spent
from services.console.pages import PageContext, fetched, follows, pending, problems_of
from services.console.sessions import session_of
from services.console.tiles import Tile
from services.console.time_range import time_range_of

T = TypeVar("T")

LATEST = 8
SHOWN = 20
"""Rows of a table."""


def routes(context: PageContext) -> list[Route]:
    """The route of the page."""

    async def show(request: Request) -> Response:
        time_range = time_range_of(request, context.now(), context.zone)
        api, name = session_of(request).api, str(request.path_params["name"])
        of_name = {"agent": name}
        if not is_identifier(name):
            raise HTTPException(404)
        database, window = context.analytics, time_range.window
        summed = pending if follows(request, slow=time_range.is_long) else fetched
        of_agent = Filters(agent=name, since=window.start, until=window.end)
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
                fetched(search.search(database, of_agent, limit=LATEST)),
            ),
            asyncio.gather(
                summed(figures.errors(database, window, agent=name, limit=SHOWN)),
                summed(figures.retries(database, window, agent=name)),
                summed(figures.refusals(database, window, agent=name)),
                summed(figures.streams(database, window, agent=name)),
            ),
        )
        healths, breakers, budgets, incidents, queues = now
        history, waste, latest = past
        totals = history.value and history.value.totals
        errors, retries, held, streams = calls
        health = next((one for one in healths.value or () if one.agent_id == name), None)
        own_budgets = [one for one in budgets.value.budgets if one.agent == name] if budgets.value else None
        present_tiles = [_jobs(queue_of(queues.value, name)), tiles.incidents(incidents.value)]
        if own_budgets is not None:
            present_tiles.append(tiles.spent_budgets(own_budgets, "#budgets", "it has none of its own"))
        if totals is not None:
            fallbacks = counted(totals.fallbacks, "fallback")
            present_tiles.append(Tile("Retries", f"{totals.retries:,}", fallbacks, "#retries"))
        known = health is not None or healths.value is None or totals is None or _did_something(totals)
        return context.pages.render(
            request,
            "agent.html",
            status=200 if known else 404,
            time_range=time_range,
            name=name,
            known=known,
            health=health,
            configured=healths.value is not None,
            breakers={one.model: one for one in breakers.value.breakers if one.agent == name} if breakers.value else {},
            past_tiles=tiles.pending() if history.pending else tiles.of_history(totals, time_range, name),
            present_tiles=present_tiles,
            problems=problems_of(*now, *past, *calls),
            pending=history.pending,
            history=history,
            history_charts=history.value and history_charts(history.value.steps, window, name),
            errors=errors,
            waste=waste,
            all_waste=sum(line.cost for line in waste.value or ()),
            unknown_waste=totals and totals.unknown_waste,
            retries=retries.value,
            helped=None if retries.value is None else helped(retries.value, time_range.words),
            held=held,
            streams=streams.value,
            budgets=own_budgets,
            spent=spent,
            latest=latest,
        )

    return [Route("/agents/{name:path}", show, methods=["GET"])]


def helped(tried: RetryFigures, when: str) -> tuple[str, ...]:
    """Whether retrying was worth it, in sentences.

    Args:
        tried: what happened.
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
