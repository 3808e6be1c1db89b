"""The page of all agents: their health, spend, waste and waiting jobs."""

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
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part, problems_of
from breakwater.identity.pages.visits import Visit, page, sums_reader
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
    """An agent that is configured or has run. Unknown values are None."""

    name: str
    health: AgentHealth | None
    """The agent's health; None if it is not configured."""
    history: History | None
    """The agent's history; None if it did nothing in the time range."""
    queue: AgentQueue | None
    limited: int | None
    """The number of calls that a rate limit held back: a provider's, or one in the config."""

    @property
    def open_breakers(self) -> int | None:
        """The number of the agent's models that may not be called."""
        return None if self.health is None else sum(model.breaker in _REFUSING for model in self.health.models)

    @property
    def totals(self) -> WindowTotals | None:
        """The agent's figures in the time range; None if it did nothing."""
        return self.history and self.history.totals

    @property
    def colour(self) -> str:
        """The CSS class of a low success rate; otherwise empty."""
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
    """Makes a column of an agent's figures in the time range."""
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

LINK = NavigationLink("/agents", "Agents", "a")


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(
            context,
            "/agents",
            "agents.html",
            view,
            default_range=BY_DATA,
            healths=lambda _, models: fetch_part(models.api.read(list[AgentHealth], "agents")),
            queues=lambda _, models: fetch_part(models.api.read(Queues, "queues")),
            histories=sums_reader(figures.agents),
            refusals=sums_reader(figures.refusals),
        ),
        *agent.routes(context),
    ]


def view(
    visit: Visit,
    healths: PagePart[list[AgentHealth]],
    queues: PagePart[Queues],
    histories: PagePart[dict[str, History]],
    refusals: PagePart[tuple[RefusalLine, ...]],
) -> dict[str, Any]:
    """The values of the page."""
    rows = _rows(healths.value or (), histories.value or {}, queues.value, refusals.value)
    return {
        "table": PageTable(visit.address, "agents", "Agents", COLUMNS, rows, sort="health", prefix=""),
        "configured": healths.value is not None,
        "ran": histories.value is not None,
        "pending": histories.pending,
        "problems": problems_of(healths, queues, histories, refusals),
        "sparks": sparks,
    }


def limited_calls(lines: Iterable[RefusalLine]) -> Counter[str]:
    """Counts the calls that a rate limit held back, by agent."""
    counts: Counter[str] = Counter()
    for line in lines:
        if line.kind == "rate_limit":
            counts[line.agent] += line.attempts
    return counts


def _rows(
    healths: Iterable[AgentHealth],
    histories: Mapping[str, History],
    queues: Queues | None,
    refusals: Iterable[RefusalLine] | None,
) -> list[AgentRow]:
    health_by_agent = {agent.agent_id: agent for agent in healths}
    queue_by_agent = {} if queues is None else {agent.agent: agent for agent in queues.agents}
    limited_by_agent = None if refusals is None else limited_calls(refusals)
    names = health_by_agent.keys() | histories.keys() | queue_by_agent.keys()
    return [
        AgentRow(
            name,
            health_by_agent.get(name),
            histories.get(name),
            queue_by_agent.get(name),
            None if limited_by_agent is None else limited_by_agent[name],
        )
        for name in sorted(names)
    ]
