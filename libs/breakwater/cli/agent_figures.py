"""What agents did since a time, from ClickHouse, and what they spent today, from Redis: `breakwater agents --since`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from breakwater.cli import connect, formats, output
from breakwater.cli.errors import CliError

if TYPE_CHECKING:
    from breakwater.analytics.queries import AgentSummary
    from breakwater.config import Config


@dataclass(frozen=True, slots=True)
class Figures:
    """What was found; None where who knows it does not answer."""

    summaries: Mapping[str, AgentSummary] | None
    spent_today: Mapping[str, int] | None
    """Nano-dollars, by agent, for those that spent."""
    missing: tuple[CliError, ...]


async def look(clickhouse_url: str, redis_url: str, config: Config, since: datetime) -> Figures:
    """Asks both at the same time. Raises nothing where one of them does not answer."""
    import asyncio

    summaries, spent = await asyncio.gather(
        _summaries(clickhouse_url, since), _spent_today(redis_url, config), return_exceptions=True
    )
    return Figures(
        None if isinstance(summaries, BaseException) else summaries,
        None if isinstance(spent, BaseException) else spent,
        tuple(_known(answer) for answer in (summaries, spent) if isinstance(answer, BaseException)),
    )


def show(agents: Sequence[str], figures: Figures) -> None:
    """Prints a row for each agent, and for each that is configured no more and has run."""
    rows: list[tuple[output.Cell, ...]] = []
    for name in (*agents, *gone(agents, figures)):
        summary = (figures.summaries or {}).get(name)
        rows.append(
            (
                name if name in agents else (f"{name} (not configured)", "dim"),
                str(summary.executions) if summary else "0" if figures.summaries is not None else "",
                "" if summary is None or summary.success_rate is None else _rate(summary.success_rate),
                formats.duration(summary.p50_ms) if summary else "",
                formats.duration(summary.p95_ms) if summary else "",
                f"{summary.retries}/{summary.fallbacks}/{summary.short_circuits}" if summary else "",
                _spend(summary) if summary else "",
                formats.money(summary.wasted) if summary else "",
                formats.money(figures.spent_today.get(name, 0)) if figures.spent_today is not None else "",
            )
        )
    output.table(
        [
            output.Column("agent"),
            output.Column("runs", right=True, drop=2),
            output.Column("ok", right=True, drop=1),
            output.Column("p50", right=True, drop=6),
            output.Column("p95", right=True, drop=5),
            output.Column("retried/fell back/refused", right=True, drop=8),
            output.Column("cost", right=True, drop=4),
            output.Column("wasted", right=True, drop=7),
            output.Column("today", right=True, drop=3),
        ],
        rows,
        empty="no agents",
    )


def document(agent: str, figures: Figures) -> dict[str, Any]:
    """An agent's figures for programs; None where they are not known."""
    from breakwater.contracts.types import usd_from_nano

    def usd(nano: int | None) -> str | None:
        return None if nano is None else usd_from_nano(nano)

    summary, spent = (figures.summaries or {}).get(agent), figures.spent_today
    told: dict[str, Any] | None = None
    if summary is not None:
        told = asdict(summary) | {
            "success_rate": summary.success_rate,
            "spend": usd(summary.spend),
            "wasted": usd(summary.wasted),
        }
    return {"figures": told, "spent_today": None if spent is None else usd(spent.get(agent, 0))}


def gone(agents: Sequence[str], figures: Figures) -> list[str]:
    """The agents that have run, and are not configured any more."""
    return sorted(set(figures.summaries or ()) - set(agents))


async def _summaries(url: str, since: datetime) -> dict[str, AgentSummary]:
    from breakwater.analytics.queries import agent_summaries

    async with connect.analytics(url) as analytics:
        return {summary.agent: summary for summary in await agent_summaries(analytics, since=since)}


async def _spent_today(url: str, config: Config) -> dict[str, int]:
    from breakwater.policy.periods import period
    from breakwater.state.budget_counters import BudgetCounters

    zone = config.budgets.zone
    async with connect.state(url) as redis:
        snapshot = await BudgetCounters(redis, zone).snapshot([period("daily", datetime.now(UTC), zone)])
    sums = snapshot.periods[0].figures
    return {key.removeprefix("agent:"): one.spent for key, one in sums.items() if key.startswith("agent:")}


def _known(error: BaseException) -> CliError:
    from breakwater.cli.errors import expected

    known = expected(error)
    if known is None:
        raise error
    return known


def _rate(rate: float) -> output.Cell:
    # Rounded down: 99.96 % is not all.
    text = f"{int(rate * 1000) / 10:.1f} %"
    return (text, "green" if rate >= 0.99 else "yellow" if rate >= 0.9 else "red")


def _spend(summary: AgentSummary) -> str:
    more = "+" if summary.unknown_costs and summary.spend is not None else ""
    return f"{formats.money(summary.spend)}{more}"
