"""`breakwater agents`: how every agent fares, on each of its models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from breakwater.cli import agent_figures, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import ExitCode
from breakwater.cli.plane import ApiKeyOption, ConfigOption, DataOption, JsonOption, Plane, UrlOption

if TYPE_CHECKING:
    from breakwater.contracts.api import AgentHealth, ModelHealth
    from breakwater.contracts.events import BreakerState


def agents(
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Show runs, latency and cost too, since: 1h, 24h, 7d, a time."),
    ] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how every agent fares, and how on each of its models.

    `healthy`; `degraded`: something is amiss; `unhealthy`: no call gets through. A model is unhealthy while its breaker
    is not closed, an agent when all its models are. The column `fails` counts failed calls in a row.

    With --since it also shows what each agent did, from ClickHouse, and what it spent today, from Redis.

    For example:

        breakwater agents

        breakwater agents --since 7d

        breakwater agents --json | jq -r '.[] | select(.health != "healthy") | .agent_id'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import AgentHealth

    now = datetime.now(UTC)
    begin = None if since is None else formats.since(since, now)
    plane = Plane(data)
    document = run(api.get(plane.door(url, api_key), "agents"))
    told = api.read(list[AgentHealth], document)
    names = [agent.agent_id for agent in told]
    figures = None
    if begin is not None:
        where = plane.clickhouse_url, plane.redis_url, plane.config(config)
        figures = run(agent_figures.look(*where, begin))
        for error in figures.missing:
            output.note(error.message)
    if as_json:
        if figures is not None:
            document = [
                *(agent | agent_figures.document(agent["agent_id"], figures) for agent in document),
                *(
                    {"agent_id": name, "health": None, **agent_figures.document(name, figures)}
                    for name in agent_figures.gone(names, figures)
                ),
            ]
        output.json_document(document)
    else:
        _show_health(told, now)
        if figures is not None:
            output.write("")
            agent_figures.show(names, figures)
    if figures is not None and len(figures.missing) == 2:
        raise typer.Exit(ExitCode.UNREACHABLE)


def _show_health(agents: list[AgentHealth], now: datetime) -> None:
    rows: list[tuple[output.Cell, ...]] = []
    for agent in agents:
        until = agent.circuit_open_until
        opens = "" if until is None else open_until("open", until, now)
        rows.append(((agent.agent_id, "bold"), output.state(agent.health), "", *_calls(agent, now), opens))
        for model in agent.models:
            breaker = ("off", "dim") if model.breaker is None else output.state(model.breaker)
            opens = open_until(model.breaker, model.circuit_open_until, now)
            rows.append((f"  {model.model}", output.state(model.health), breaker, *_calls(model, now), opens))
    output.table(
        [
            output.Column("agent, models"),
            output.Column("health"),
            output.Column("breaker"),
            output.Column("fails", right=True, drop=1),
            output.Column("last failure", drop=2),
            output.Column("last success", drop=3),
            output.Column("open until"),
        ],
        rows,
        empty="no agents are configured",
    )


def _calls(told: AgentHealth | ModelHealth, now: datetime) -> tuple[str, str, str]:
    failure, success = told.last_failure_at, told.last_success_at
    return (
        str(told.consecutive_failures),
        "" if failure is None else formats.clock(failure, now),
        "" if success is None else formats.clock(success, now),
    )


def open_until(state: BreakerState | None, until: datetime | None, now: datetime) -> str:
    """When a breaker may let a call pass again, in words; empty where it lets calls pass."""
    if state == "isolated":
        return "until reset"
    if state == "half_open":
        return "a call probes it"
    if state != "open":
        return ""
    if until is None or until <= now:
        return "next call probes it"
    return f"{formats.clock(until, now)}, {formats.duration((until - now).total_seconds() * 1000)}"
