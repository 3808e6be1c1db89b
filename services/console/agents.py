"""All agents: how each is, what it spends and wastes, what waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.analytics import overview
from breakwater.analytics.breakdown import RefusalLine, refusals
from breakwater.analytics.overview import AgentLine, WindowTotals
from breakwater.contracts.api import AgentHealth, AgentQueue, Queues
from services.console import agent
from services.console.history import sparks
from services.console.overall_health import MANY_FAIL, SOME_FAIL, shares
from services.console.pages import PageContext, fetched, follows, pending, problems_of
from services.console.sessions import session_of
from services.console.time_range import time_range_of

_REFUSING = ("open", "isolated")
_WORST_FIRST = ("unhealthy", "degraded", "healthy", "unknown")


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent that is configured, or that ran. None stands for what is unknown."""

    name: str
    health: AgentHealth | None
    """None if it is not configured."""
    line: AgentLine | None
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
        return self.line and self.line.totals

    @property
    def colour(self) -> str:
        """A class for the success rate if it is low; otherwise empty."""
        failed, _ = shares(self.totals)
        return "" if failed is None or failed < SOME_FAIL else " warn-text" if failed < MANY_FAIL else " bad-text"


_Sorting = Callable[[AgentRow], "float | str | None"]

COLUMNS: dict[str, tuple[str, _Sorting]] = {
    "name": ("Agent", lambda row: row.name),
    "health": ("Health", lambda row: None if row.health is None else _WORST_FIRST.index(row.health.health)),
    "success": ("Success", lambda row: row.totals and row.totals.success_rate),
    "executions": ("Executions", lambda row: row.totals and -row.totals.executions),
    "p95": ("p95", lambda row: _largest_first(row.totals and row.totals.p95_ms)),
    "retries": ("Retries", lambda row: row.totals and -row.totals.retries),
    "spend": ("Spend", lambda row: _largest_first(row.totals and row.totals.spend)),
    "wasted": ("Wasted", lambda row: _largest_first(row.totals and row.totals.wasted)),
    "waiting": ("Jobs now", lambda row: row.queue and _largest_first(row.queue.waiting)),
    "limited": ("Limited", lambda row: _largest_first(row.limited)),
}
"""The columns and their sort keys: the smallest first, which is what people look for. None comes last."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show(request: Request) -> Response:
        api, time_range = session_of(request).api, time_range_of(request, context.now(), context.zone)
        summed = pending if follows(request, time_range) else fetched
        parts = await asyncio.gather(
            fetched(api.read(list[AgentHealth], "agents")),
            fetched(api.read(Queues, "queues")),
            summed(overview.agents(context.analytics, time_range.window)),
            summed(refusals(context.analytics, time_range.window)),
        )
        healths, queues, lines, held = parts
        order, backwards = _order(request)
        rows = _rows(healths.value or (), lines.value or (), queues.value, held.value)
        return context.pages.render(
            request,
            "agents.html",
            time_range=time_range,
            rows=in_order(rows, order, backwards=backwards),
            configured=healths.value is not None,
            ran=lines.value is not None,
            pending=lines.pending,
            problems=problems_of(*parts),
            columns=[_column(request, name, order, backwards=backwards) for name in COLUMNS],
            sparks=sparks,
        )

    return [Route("/agents", show, methods=["GET"]), *agent.routes(context)]


def in_order(rows: Sequence[AgentRow], order: str, *, backwards: bool = False) -> list[AgentRow]:
    """Rows sorted by one of COLUMNS and then by name; those whose value is unknown come last."""
    key = COLUMNS[order][1]
    by_name = sorted(rows, key=lambda row: row.name)
    known = [row for row in by_name if key(row) is not None]
    # The sort is stable, also in reverse: equal rows stay in the order of their names.
    known.sort(key=lambda row: key(row) or 0 if order != "name" else row.name, reverse=backwards)
    return known + [row for row in by_name if key(row) is None]


def limited(lines: Iterable[RefusalLine]) -> Counter[str]:
    """How many calls a rate limit held back, by agent."""
    counts: Counter[str] = Counter()
    for line in lines:
        if line.kind == "rate_limit":
            counts[line.agent] += line.attempts
    return counts


def _rows(
    healths: Iterable[AgentHealth],
    lines: Iterable[AgentLine],
    queues: Queues | None,
    held: Iterable[RefusalLine] | None,
) -> list[AgentRow]:
    health = {one.agent_id: one for one in healths}
    line = {one.agent: one for one in lines}
    queue = {} if queues is None else {one.agent: one for one in queues.agents}
    counts = None if held is None else limited(held)
    names = health.keys() | line.keys() | queue.keys()
    return [
        AgentRow(name, health.get(name), line.get(name), queue.get(name), None if counts is None else counts[name])
        for name in sorted(names)
    ]


def _order(request: Request) -> tuple[str, bool]:
    """The column in `?sort=`, and whether a minus in front of it reverses the order."""
    wanted = request.query_params.get("sort", "health")
    name = wanted.removeprefix("-")
    return (name, wanted.startswith("-")) if name in COLUMNS else ("health", False)


def _column(request: Request, name: str, order: str, *, backwards: bool) -> tuple[str, str, str | None]:
    """A column's heading: its text, the URL that sorts by it, and the present order, for screen readers."""
    reversed_next = name == order and not backwards
    query = dict(request.query_params) | {"sort": f"-{name}" if reversed_next else name}
    sorted_now = None if name != order else "descending" if backwards else "ascending"
    return COLUMNS[name][0], f"/agents?{urlencode(query)}", sorted_now


def _largest_first(number: float | None) -> float | None:
    return None if number is None else -number
