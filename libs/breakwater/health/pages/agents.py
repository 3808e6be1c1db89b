"""All agents: health, spend, waste, and waiting jobs of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from breakwater.breakers.contract import AgentHealth
from breakwater.health.pages import agent
from breakwater.health.pages.history import sparks
from breakwater.health.pages.overall_health import MANY_FAIL, SOME_FAIL, shares
from breakwater.identity.pages.pages import Fetched, PageContext, fetched, problems_of
from breakwater.identity.pages.visits import Visit, page, summed
from breakwater.kernel.columns import Column, ColumnKind
from breakwater.kernel.http.contract import AgentQueue, Queues
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import BY_DATA
from breakwater.records import figures
from breakwater.records.figures import History, RefusalLine, WindowTotals

_REFUSING = ("open", "isolated")
_WORST_FIRST = ("unhealthy", "degraded", "healthy")


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent that is configured, or that ran; None is unknown."""

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
        """Number of its models that may not be called."""
        return None if self.health is None else sum(one.breaker in _REFUSING for one in self.health.models)

    @property
    def totals(self) -> WindowTotals | None:
        """Its figures in the time range; None if it did nothing."""
        return self.history and self.history.totals

    @property
    def colour(self) -> str:
        """A class for the success rate if it is low; otherwise empty."""
        failed, _ = shares(self.totals)
        return "" if failed is None or failed < SOME_FAIL else " warn-text" if failed < MANY_FAIL else " bad-text"


def _column(
    title: str,
    value: Callable[[WindowTotals], float | None],
    kind: ColumnKind,
    name: str = "",
    *,
    worst_first: bool = False,
) -> Column[AgentRow]:
    """A column of what an agent did in the time range."""
    return Column(
        title, lambda row: row.totals and value(row.totals), kind, name=name, missing="–", smallest_first=worst_first
    )


COLUMNS: tuple[Column[AgentRow], ...] = (
    Column("agent", lambda row: row.name, name="name"),
    Column(
        "health",
        lambda row: row.health and row.health.health,
        "state",
        order=lambda row: row.health and _WORST_FIRST.index(row.health.health),
    ),
    Column("health reason", lambda row: row.health and row.health.health_reason, page=False),
    Column("over time", None),
    _column("success", lambda totals: totals.success_rate, "percent", worst_first=True),
    _column("executions", lambda totals: totals.executions, "count"),
    _column("p95", lambda totals: totals.p95_ms, "duration", "p95_ms"),
    _column("retries", lambda totals: totals.retries, "count"),
    _column("spend", lambda totals: totals.spend, "usd"),
    _column("wasted", lambda totals: totals.wasted, "usd"),
    Column("jobs now", lambda row: row.queue and row.queue.waiting, "count", name="waiting"),
    Column("in_progress", lambda row: row.queue and row.queue.in_progress, page=False),
    Column("limited", lambda row: row.limited, "count"),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(
            context,
            "/agents",
            "agents.html",
            view,
            default_range=BY_DATA,
            healths=lambda _, models: fetched(models.api.read(list[AgentHealth], "agents")),
            queues=lambda _, models: fetched(models.api.read(Queues, "queues")),
            histories=summed(figures.agents),
            held=summed(figures.refusals),
        ),
        *agent.routes(context),
    ]


def view(
    visit: Visit,
    healths: Fetched[list[AgentHealth]],
    queues: Fetched[Queues],
    histories: Fetched[dict[str, History]],
    held: Fetched[tuple[RefusalLine, ...]],
) -> dict[str, Any]:
    """A table of the agents."""
    rows = _rows(healths.value or (), histories.value or {}, queues.value, held.value)
    return {
        "table": PageTable(visit.address, "agents", "Agents", COLUMNS, rows, sort="health", prefix=""),
        "configured": healths.value is not None,
        "ran": histories.value is not None,
        "pending": histories.pending,
        "problems": problems_of(healths, queues, histories, held),
        "sparks": sparks,
    }


def limited(lines: Iterable[RefusalLine]) -> Counter[str]:
    """Calls that a rate limit held back, by agent."""
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
