"""`breakwater agents`: how every agent is doing: figures from ClickHouse, breakers and spend from Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, ExitCode
from breakwater.cli.plane import ConfigOption, DataOption, JsonOption, Plane

if TYPE_CHECKING:
    from breakwater.analytics.queries import AgentSummary
    from breakwater.config import Config


@dataclass(frozen=True, slots=True)
class ModelBreaker:
    """The breaker of an agent's model, as Redis has it now."""

    model: str
    state: str
    """`open`, `half_open`, `closed`, or `off` where the config has none."""
    open_for_ms: int | None
    """How long calls are still refused; None unless open."""


@dataclass(frozen=True, slots=True)
class Live:
    """What Redis knows now."""

    breakers: Mapping[str, tuple[ModelBreaker, ...]]
    spent_today: Mapping[str, int]
    """Nano-dollars, by agent, for those that spent."""


def agents(
    since: Annotated[str, typer.Option("--since", metavar="AGO", help="Figures since: 1h, 24h, 7d, a time.")] = "24h",
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every agent: successes, latency and cost, the state of its breakers now, and what it spent today.

    Figures come from ClickHouse, breakers and today's spend from Redis. Where one of the two does not answer the rest
    is shown, and what is missing is said.

    For example:

        breakwater agents

        breakwater agents --since 7d --json | jq '.[] | {agent, success_rate, spend}'
    """
    begin = formats.since(since, datetime.now(UTC))
    plane = Plane(data)
    # Asked first: no running plane at all is told once, and before the config file is missed.
    urls = plane.clickhouse_url, plane.redis_url
    settings = plane.config(config)
    summaries, live, missing = run(_look(*urls, settings, begin))
    for error in missing:
        output.note(f"{error.message}")
    if as_json:
        output.json_document([_json(name, settings, summaries, live) for name in _names(settings, summaries)])
    else:
        _table(settings, summaries, live)
    if len(missing) == 2:
        raise typer.Exit(ExitCode.UNREACHABLE)


async def _look(
    clickhouse_url: str, redis_url: str, config: Config, since: datetime
) -> tuple[dict[str, AgentSummary] | None, Live | None, list[CliError]]:
    import asyncio

    from breakwater.cli.errors import expected

    figures, live = await asyncio.gather(
        _figures(clickhouse_url, since), _live(redis_url, config), return_exceptions=True
    )
    missing: list[CliError] = []
    for answer in (figures, live):
        if isinstance(answer, BaseException):
            known = expected(answer)
            if known is None:
                raise answer
            missing.append(known)
    return (
        None if isinstance(figures, BaseException) else figures,
        None if isinstance(live, BaseException) else live,
        missing,
    )


async def _figures(url: str, since: datetime) -> dict[str, AgentSummary]:
    from breakwater.analytics.queries import agent_summaries

    async with connect.analytics(url) as analytics:
        return {summary.agent: summary for summary in await agent_summaries(analytics, since=since)}


async def _live(url: str, config: Config) -> Live:
    from breakwater.state.breakers import BreakerKey, Breakers
    from breakwater.state.budgets import Budgets

    keys = [
        BreakerKey(name, model)
        for name, agent in config.agents.items()
        if agent.breaker is not None
        for model in agent.chain
    ]
    async with connect.state(url) as redis:
        loaded = await Breakers(redis).load(keys) if keys else []
        counters = await Budgets(redis, config.budgets.zone).counters("daily", datetime.now(UTC))
    found: dict[str, list[ModelBreaker]] = {
        name: [ModelBreaker(model, "off", None) for model in agent.chain] if agent.breaker is None else []
        for name, agent in config.agents.items()
    }
    for key, one in zip(keys, loaded, strict=True):
        left_ms = one.breaker.open_until_ms - one.now_ms
        is_open = one.breaker.state == "open"
        found[key.agent].append(ModelBreaker(key.model, one.breaker.state, max(0, left_ms) if is_open else None))
    spent = {field.removeprefix("spent:agent:"): value for field, value in counters.items() if "spent:agent:" in field}
    return Live({name: tuple(breakers) for name, breakers in found.items()}, spent)


def _names(config: Config, summaries: Mapping[str, AgentSummary] | None) -> list[str]:
    gone = sorted(set(summaries or ()) - set(config.agents))
    return [*config.agents, *gone]


def _table(config: Config, summaries: Mapping[str, AgentSummary] | None, live: Live | None) -> None:
    rows: list[tuple[output.Cell, ...]] = []
    for name in _names(config, summaries):
        summary = (summaries or {}).get(name)
        rows.append(
            (
                name if name in config.agents else (f"{name} (not configured)", "dim"),
                _breakers(live.breakers.get(name, ())) if live else "",
                str(summary.executions) if summary else "0" if summaries is not None else "",
                "" if summary is None or summary.success_rate is None else _rate(summary.success_rate),
                formats.duration(summary.p50_ms) if summary else "",
                formats.duration(summary.p95_ms) if summary else "",
                f"{summary.retries}/{summary.fallbacks}/{summary.short_circuits}" if summary else "",
                _spend(summary) if summary else "",
                formats.money(summary.wasted) if summary else "",
                formats.money(live.spent_today.get(name, 0)) if live else "",
            )
        )
    output.table(
        [
            output.Column("agent"),
            output.Column("breakers"),
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
    )


def _breakers(breakers: tuple[ModelBreaker, ...]) -> output.Cell:
    """What is not closed, in words; else that all is well."""
    if all(one.state == "off" for one in breakers):
        return ("off", "dim")
    parts = [
        f"{one.model} half open" if one.state == "half_open" else f"{one.model} open{_for(one.open_for_ms)}"
        for one in breakers
        if one.state in ("open", "half_open")
    ]
    if not parts:
        return output.state("closed")
    worst = "open" if any(one.state == "open" for one in breakers) else "half_open"
    return output.state(worst, ", ".join(parts))


def _for(open_for_ms: int | None) -> str:
    return f" {formats.duration(open_for_ms)}" if open_for_ms else ", next call probes"


def _rate(rate: float) -> output.Cell:
    # Rounded down: 99.96 % is not all.
    text = f"{int(rate * 1000) / 10:.1f} %"
    return (text, "green" if rate >= 0.99 else "yellow" if rate >= 0.9 else "red")


def _spend(summary: AgentSummary) -> str:
    more = "+" if summary.unknown_costs and summary.spend is not None else ""
    return f"{formats.money(summary.spend)}{more}"


def _json(name: str, config: Config, summaries: Mapping[str, AgentSummary] | None, live: Live | None) -> dict[str, Any]:
    from dataclasses import asdict

    from breakwater.contracts.types import usd_from_nano

    def usd(nano: int | None) -> str | None:
        return None if nano is None else usd_from_nano(nano)

    summary = (summaries or {}).get(name)
    figures: dict[str, Any] = {}
    if summary is not None:
        figures = asdict(summary) | {
            "success_rate": summary.success_rate,
            "spend": usd(summary.spend),
            "wasted": usd(summary.wasted),
        }
    return {
        "agent": name,
        "configured": name in config.agents,
        **figures,
        "breakers": None if live is None else [asdict(one) for one in live.breakers.get(name, ())],
        "spent_today": None if live is None else usd(live.spent_today.get(name, 0)),
    }
