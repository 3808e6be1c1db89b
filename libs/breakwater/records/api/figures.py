"""`/api/v1/agents/figures`: runs, latency and costs of agents."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from breakwater.identity.operations import ApiRequest, operation
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.errors import UnavailableError
from breakwater.limits.rules.budget import period
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.records.api.executions import ask_clickhouse
from breakwater.records.contract import AgentFigures, AgentFiguresList, FiguresQuery
from breakwater.records.figures import agent_summaries


@dataclass(frozen=True, slots=True)
class FigureRoutes:
    """The figures of agents."""

    analytics: Analytics
    budget_counters: BudgetCounters
    zone: ZoneInfo

    @operation(
        "GET",
        "/api/v1/agents/figures",
        tag="agents",
        summary="Runs, latency and costs of all agents",
        description="Counted in ClickHouse since a time; what was spent today comes from Redis. Without one of them, "
        "its part is null.",
        result="The figures.",
    )
    async def list_agent_figures(self, request: ApiRequest[FiguresQuery]) -> AgentFiguresList:
        """Lists the figures of agents that ran, by name. Asks ClickHouse and Redis at the same time."""
        figures, spent = await asyncio.gather(
            self._figures(request.input.since), self._spent_today(), return_exceptions=True
        )
        missing = list[str]()
        for answer in (figures, spent):
            if isinstance(answer, UnavailableError):
                missing.append(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        return AgentFiguresList(
            agents=None if isinstance(figures, BaseException) else figures,
            spent_today=None if isinstance(spent, BaseException) else spent,
            missing=tuple(missing),
        )

    async def _figures(self, since: datetime) -> tuple[AgentFigures, ...]:
        summaries = await ask_clickhouse(agent_summaries(self.analytics, since=since))
        return tuple(
            AgentFigures(
                **asdict(summary),
                success_rate=summary.success_rate,
                fallback_share=summary.fallback_share,
                fallback_cost_factor=summary.fallback_cost_factor,
            )
            for summary in summaries
        )

    async def _spent_today(self) -> dict[str, int]:
        snapshot = await self.budget_counters.read([period("daily", datetime.now(UTC), self.zone)])
        sums = snapshot.periods[0].figures
        return {key.removeprefix("agent:"): spend.spent for key, spend in sums.items() if key.startswith("agent:")}
