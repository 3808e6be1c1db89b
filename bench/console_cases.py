"""The queries of the console, each as the benchmark runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import Window as BudgetWindow
from breakwater.limits.rules.budget import period, recent_from
from breakwater.records import events, figures, search, spend
from breakwater.records.contract import CostsBy
from breakwater.records.rules.costs import CostSums, month_before
from breakwater.records.search import Cursor, Filters

AGENT = "support-triage"
"""The busiest one."""

ZONE = ZoneInfo("UTC")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a case may ask with."""

    window: TimeWindow
    middle: Cursor
    """Half of all executions are older."""
    last: Cursor
    """Less than a page of executions is older."""
    an_id: str
    """Of an execution in the middle."""


@dataclass(frozen=True, slots=True)
class Case:
    """A query of the console."""

    name: str
    run: Callable[[Analytics, Moment], Awaitable[Any]]
    every_window: bool = True
    """Run over an hour, a day, a week and a month; else once."""


def _all(moment: Moment, **given: Any) -> Filters:
    return Filters(since=moment.window.start, until=moment.window.end, **given)


async def _page_2(analytics: Analytics) -> search.Page:
    """Both pages, as one who turns over sees them."""
    first = await search.search(analytics, Filters())
    return await search.search(analytics, Filters(), after=first.older)


async def _burn(analytics: Analytics, moment: Moment, of: BudgetWindow, key: str) -> spend.Burn:
    now = moment.window.end - timedelta(minutes=1)
    return await spend.burn(analytics, period(of, now, ZONE), key, ZONE, now)


async def _spent_lately(analytics: Analytics, moment: Moment, of: BudgetWindow) -> dict[str, int]:
    now = moment.window.end - timedelta(minutes=1)
    since = time_from_ms(recent_from(period(of, now, ZONE), ms_from_time(now)))
    return await spend.spent_since(analytics, since, now)


async def _month(analytics: Analytics, moment: Moment, by: CostsBy) -> dict[str | None, CostSums]:
    now = moment.window.end - timedelta(minutes=1)
    month = period("monthly", now, ZONE)
    return await spend.month_costs(analytics, month, month_before(month, ZONE), by, tag=None, now_ms=ms_from_time(now))


CASES: list[Case] = [
    Case("figures.history", lambda a, m: figures.history(a, m.window)),
    Case("figures.history of an agent", lambda a, m: figures.history(a, m.window, agent=AGENT)),
    Case("figures.agents", lambda a, m: figures.agents(a, m.window)),
    Case("figures.errors", lambda a, m: figures.errors(a, m.window)),
    Case("figures.errors of an agent", lambda a, m: figures.errors(a, m.window, agent=AGENT)),
    Case("figures.providers", lambda a, m: figures.providers(a, m.window)),
    Case("figures.providers of an agent", lambda a, m: figures.providers(a, m.window, agent=AGENT)),
    Case("figures.waste", lambda a, m: figures.waste(a, m.window)),
    Case("figures.waste of an agent", lambda a, m: figures.waste(a, m.window, agent=AGENT)),
    Case("figures.retries", lambda a, m: figures.retries(a, m.window)),
    Case("figures.retries of an agent", lambda a, m: figures.retries(a, m.window, agent=AGENT)),
    Case("figures.spend_by agent", lambda a, m: figures.spend_by(a, m.window, "agent")),
    Case("figures.spend_by tenant", lambda a, m: figures.spend_by(a, m.window, "tenant")),
    Case("figures.spend_by model", lambda a, m: figures.spend_by(a, m.window, "model")),
    Case("costs of a month, by tenant", lambda a, m: _month(a, m, "tenant"), every_window=False),
    Case("costs of a month, by key", lambda a, m: _month(a, m, "key"), every_window=False),
    Case("audit", lambda a, m: events.audit_events(a, m.window)),
    Case("refusals", lambda a, m: figures.refusals(a, m.window)),
    Case("refusals of an agent", lambda a, m: figures.refusals(a, m.window, agent=AGENT)),
    Case("search.facets", lambda a, m: search.facets(a, m.window)),
    Case("search.count", lambda a, m: search.count(a, _all(m))),
    Case("search.count of a tenant", lambda a, m: search.count(a, _all(m, tenant="acme"))),
    Case("search, page 1", lambda a, m: search.search(a, _all(m))),
    Case("search, page 1 of an agent", lambda a, m: search.search(a, _all(m, agent=AGENT))),
    Case("search, failed of a tenant", lambda a, m: search.search(a, _all(m, tenant="gekko", status="dead_lettered"))),
    Case("search, nothing has it", lambda a, m: search.search(a, _all(m, task_id="no such task"))),
    Case("search, words", lambda a, m: search.search(a, _all(m, text="overloaded"))),
    Case("search, words of nothing", lambda a, m: search.search(a, _all(m, text="no such words"))),
    Case("search_runs, page 1", lambda a, m: search.search_runs(a, _all(m))),
    Case("search_runs, page 1 of an agent", lambda a, m: search.search_runs(a, _all(m, agent=AGENT))),
    Case("search_runs, words", lambda a, m: search.search_runs(a, _all(m, text="overloaded"))),
    Case("largest_runs", lambda a, m: search.largest_runs(a, _all(m), "total_cost")),
    Case(
        "search_runs, in the middle", lambda a, m: search.search_runs(a, Filters(), after=m.middle), every_window=False
    ),
    Case("search_runs, last page", lambda a, m: search.search_runs(a, Filters(), after=m.last), every_window=False),
    Case("search, page 2", lambda a, _: _page_2(a), every_window=False),
    Case("search, in the middle", lambda a, m: search.search(a, Filters(), after=m.middle), every_window=False),
    Case("search, back from the middle", lambda a, m: search.search(a, Filters(), before=m.middle), every_window=False),
    Case("search, last page", lambda a, m: search.search(a, Filters(), after=m.last), every_window=False),
    Case("search, a whole id", lambda a, m: search.search(a, Filters(text=m.an_id)), every_window=False),
    Case("search, an id's beginning", lambda a, m: search.search(a, Filters(text=m.an_id[:20])), every_window=False),
    Case("search.find_execution", lambda a, m: search.find_execution(a, m.an_id), every_window=False),
    Case("burn of a day", lambda a, m: _burn(a, m, "daily", "global"), every_window=False),
    Case("burn of a month", lambda a, m: _burn(a, m, "monthly", "global"), every_window=False),
    Case("burn of an agent's month", lambda a, m: _burn(a, m, "monthly", f"agent:{AGENT}"), every_window=False),
    Case("spend.spent_since, of a day", lambda a, m: _spent_lately(a, m, "daily"), every_window=False),
    Case("spend.spent_since, of a month", lambda a, m: _spent_lately(a, m, "monthly"), every_window=False),
    Case("transitions.openings", lambda a, m: events.openings(a, m.window, m.window.end)),
    Case("transitions.transitions", lambda a, m: events.transitions(a, m.window, AGENT, "gpt-4o-mini")),
    Case("transitions.operator_actions", lambda a, m: events.operator_actions(a, m.window)),
    Case("incidents.incidents", lambda a, m: events.incidents(a, m.window)),
    Case("incidents.incidents, breakers", lambda a, m: events.incidents(a, m.window, event="breaker_open")),
    Case("incidents.incident_changes", lambda a, _: events.incident_changes(a, "inc_none"), every_window=False),
]
