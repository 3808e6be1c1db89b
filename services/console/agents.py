"""All agents: how each is, what it spends and wastes, what waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import figures
from breakwater.analytics.figures import History, RefusalLine, WindowTotals
from breakwater.contracts.breakers import AgentHealth
from breakwater.contracts.http import AgentQueue, Queues
from services.console import agent
from services.console.history import sparks
from services.console.overall_health import MANY_FAIL, SOME_FAIL, shares
from services.console.pages import PageContext, fetched, follows, pending, problems_of
from services.console.sessions import session_of
from services.console.tables import TableColumn, table_of
from services.console.time_range import time_range_of

_REFUSING = ("open", "isolated")
_WORST_FIRST = ("unhealthy", "degraded", "healthy", "unknown")


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent that is configured, or that ran. None stands for what is unknown."""

    name: str
    health: AgentHealth | None
    """None if it is not configured."""
    history: History | None
    """None if it did nothing in the time range."""
    queue: AgentQueue | None
    limited: int | None
    """Calls that a rate limit held back: a provider's, or one of ours."""

    @property
    def open_breakers(self) -> int | None:
        """How many of its models may not be called."""
        return None if self.health is None else sum(one.breaker in _REFUSING for one in self.health.models)

    @property
    def totals(self) -> WindowTotals | None:
        """What it did in the time range; None for nothing."""
        return self.history and self.history.totals

    @property
    def colour(self) -> str:
        """A class for the success rate if it is low; otherwise empty."""
        failed, _ = shares(self.totals)
        return "" if failed is None or failed < SOME_FAIL else " warn-text" if failed < MANY_FAIL else " bad-text"


COLUMNS: tuple[TableColumn[AgentRow], ...] = (
    TableColumn("name", "Agent", lambda row: row.name),
    TableColumn(
        "health",
        "Health",
        lambda row: row.health and row.health.shown,
        order=lambda row: row.health and _WORST_FIRST.index(row.health.shown),
    ),
    TableColumn("over_time", "Over time", None),
    TableColumn("success", ">Success", lambda row: row.totals and row.totals.success_rate),
    TableColumn("executions", ">Executions", lambda row: row.totals and row.totals.executions, largest_first=True),
    TableColumn("p95_ms", ">p95", lambda row: row.totals and row.totals.p95_ms, largest_first=True),
    TableColumn("retries", ">Retries", lambda row: row.totals and row.totals.retries, largest_first=True),
    TableColumn("spend", ">Spend", lambda row: row.totals and row.totals.spend, usd=True, largest_first=True),
    TableColumn("wasted", ">Wasted", lambda row: row.totals and row.totals.wasted, usd=True, largest_first=True),
    TableColumn("waiting", ">Jobs now", lambda row: row.queue and row.queue.waiting, largest_first=True),
    TableColumn("in_progress", "", lambda row: row.queue and row.queue.in_progress),
    TableColumn("limited", ">Limited", lambda row: row.limited, largest_first=True),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show(request: Request) -> Response:
        api, time_range = session_of(request).api, time_range_of(request, context.now(), context.zone)
        summed = pending if follows(request, slow=time_range.is_long) else fetched
        parts = await asyncio.gather(
            fetched(api.read(list[AgentHealth], "agents")),
            fetched(api.read(Queues, "queues")),
            summed(figures.agents(context.analytics, time_range.window)),
            summed(figures.refusals(context.analytics, time_range.window)),
        )
        healths, queues, histories, held = parts
        rows = _rows(healths.value or (), histories.value or {}, queues.value, held.value)
        return context.pages.render(
            request,
            "agents.html",
            time_range=time_range,
            table=table_of(request, "agents", "Agents", COLUMNS, rows, sort="health", prefix=""),
            configured=healths.value is not None,
            ran=histories.value is not None,
            pending=histories.pending,
            problems=problems_of(*parts),
            sparks=sparks,
        )

    return [Route("/agents", show, methods=["GET"]), *agent.routes(context)]


def limited(lines: Iterable[RefusalLine]) -> Counter[str]:
    """How many calls a rate limit held back, by agent."""
    counts: Counter[str] = Counter()
    for line in lines:
        if line.kind == "rate_limit":
            counts[line.agent] += line.attempts
    return counts


def _rows(
    healths: Iterable[AgentHealth],
    histories: Mapping[str, History],
    queues: Queues | None,
    held: Iterable[RefusalLine] | None,
) -> list[AgentRow]:
    health = {one.agent_id: one for one in healths}
    queue = {} if queues is None else {one.agent: one for one in queues.agents}
    counts = None if held is None else limited(held)
    names = health.keys() | histories.keys() | queue.keys()
    return [
        AgentRow(name, health.get(name), histories.get(name), queue.get(name), None if counts is None else counts[name])
        for name in sorted(names)
    ]
