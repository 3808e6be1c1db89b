"""Agents: how each fares, what it spends and wastes, what waits for it; and everything of one."""

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
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.time_range import time_range_of

_REFUSING = ("open", "isolated")
_WORST = ("unhealthy", "degraded", "healthy")


@dataclass(frozen=True, slots=True)
class Row:
    """An agent of the config, or one that ran. What is not known is None."""

    name: str
    health: AgentHealth | None
    """None where the config has no such agent."""
    line: AgentLine | None
    """None where it did nothing in the window."""
    queue: AgentQueue | None
    limited: int | None
    """Calls that a rate limit held back: a provider's, or one of ours."""

    @property
    def open_breakers(self) -> int | None:
        """Of its models, those that may not be called."""
        return None if self.health is None else sum(one.breaker in _REFUSING for one in self.health.models)


_Sorting = Callable[[Row], "float | str | None"]

COLUMNS: dict[str, tuple[str, _Sorting]] = {
    "name": ("Agent", lambda row: row.name),
    "health": ("Health", lambda row: None if row.health is None else _WORST.index(row.health.health)),
    "success": ("Success", lambda row: row.line and row.line.totals.success_rate),
    "executions": ("Executions", lambda row: row.line and -row.line.totals.executions),
    "p95": ("p95", lambda row: _most(row.line and row.line.totals.p95_ms)),
    "retries": ("Retries", lambda row: row.line and -row.line.totals.retries),
    "spend": ("Spend", lambda row: _most(row.line and row.line.totals.spend)),
    "wasted": ("Wasted", lambda row: _most(row.line and row.line.totals.wasted)),
    "waiting": ("Jobs now", lambda row: row.queue and _most(row.queue.waiting)),
    "limited": ("Limited", lambda row: _most(row.limited)),
}
"""The columns, and by what each sorts: the smallest first, which is what one looks for. None comes last."""


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""

    async def show(request: Request) -> Response:
        session, time_range = session_of(request), time_range_of(request, context.now(), context.zone)
        healths, queues, lines, held = await asyncio.gather(
            fetched(context.api.read(list[AgentHealth], session.key, "agents")),
            fetched(context.api.read(Queues, session.key, "queues")),
            fetched(overview.agents(context.analytics, time_range.window)),
            fetched(refusals(context.analytics, time_range.window)),
        )
        order, backwards = _order(request)
        rows = _rows(healths.value or (), lines.value or (), queues.value, held.value)
        return context.pages.render(
            request,
            "agents.html",
            time_range=time_range,
            rows=in_order(rows, order, backwards=backwards),
            configured=healths.value is not None,
            ran=lines.value is not None,
            problems=list(dict.fromkeys(one.problem for one in (healths, queues, lines, held) if one.problem)),
            columns=[_column(request, name, order, backwards=backwards) for name in COLUMNS],
            sparks=sparks,
            colour=_colour,
        )

    return [Route("/agents", show, methods=["GET"]), *agent.routes(context)]


def in_order(rows: Sequence[Row], order: str, *, backwards: bool = False) -> list[Row]:
    """Rows by one of COLUMNS, and by name where that is the same; those of which it is not known come last."""
    key = COLUMNS[order][1]
    by_name = sorted(rows, key=lambda row: row.name)
    known = [row for row in by_name if key(row) is not None]
    # The sort is stable, backwards too: equal rows stay in the order of their names.
    known.sort(key=lambda row: key(row) or 0 if order != "name" else row.name, reverse=backwards)
    return known + [row for row in by_name if key(row) is None]


def limited(lines: Iterable[RefusalLine]) -> Counter[str]:
    """How often a rate limit held calls back, by agent."""
    counts: Counter[str] = Counter()
    for line in lines:
        if line.kind == "rate_limit":
            counts[line.agent] += line.attempts
    return counts


def _colour(totals: WindowTotals | None) -> str:
    """A class for the success rate, where it is not as it should be."""
    failed, _ = shares(totals)
    return "" if failed is None or failed < SOME_FAIL else " warn-text" if failed < MANY_FAIL else " bad-text"


def _rows(
    healths: Iterable[AgentHealth],
    lines: Iterable[AgentLine],
    queues: Queues | None,
    held: Iterable[RefusalLine] | None,
) -> list[Row]:
    health = {one.agent_id: one for one in healths}
    line = {one.agent: one for one in lines}
    queue = {} if queues is None else {one.agent: one for one in queues.agents}
    counts = None if held is None else limited(held)
    names = health.keys() | line.keys() | queue.keys()
    return [
        Row(name, health.get(name), line.get(name), queue.get(name), None if counts is None else counts[name])
        for name in sorted(names)
    ]


def _order(request: Request) -> tuple[str, bool]:
    """What `?sort=` asks for; a minus in front turns it round."""
    wanted = request.query_params.get("sort", "health")
    name = wanted.removeprefix("-")
    return (name, wanted.startswith("-")) if name in COLUMNS else ("health", False)


def _column(request: Request, name: str, order: str, *, backwards: bool) -> tuple[str, str, str | None]:
    """A column's head: its text, the address that sorts by it, and how it sorts now, for screen readers."""
    turned = name == order and not backwards
    query = dict(request.query_params) | {"sort": f"-{name}" if turned else name}
    sorted_now = None if name != order else "descending" if backwards else "ascending"
    return COLUMNS[name][0], f"/agents?{urlencode(query)}", sorted_now


def _most(number: float | None) -> float | None:
    """Puts large numbers first."""
    return None if number is None else -number
