"""`breakwater agents`: the health of every agent and model; with --since, what each did and spent."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, formats, output
from breakwater.cli.api import Api, ListsByItself, api_command
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, ExitCode, expected, written, wrong_usage
from breakwater.cli.formats import program, usd
from breakwater.cli.init import StartingAgent, with_agent
from breakwater.cli.plane import DEFAULT_DATA, OWN_CONFIG, ConfigOption, DataOption, PlaneLocation, own_config
from breakwater.client import ApiError
from breakwater.contracts.breakers import AgentHealth
from breakwater.policy.breaker import GUARD_PRESETS
from breakwater.policy.formats import money
from breakwater.views.agents import HEALTH
from breakwater.views.columns import Cell, Column, Value

if TYPE_CHECKING:
    from breakwater.analytics.figures import AgentSummary
    from breakwater.config import Config

_HELP = """Show the health of agents, and add agents to the config. Alone, it is `breakwater agents list`.
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)


@app.command("list")
@api_command
def agents(
    api: Api,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Also show runs, latency and cost since: 1h, 24h, 7d, or a time."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Show the health of every agent, and of each of its models.

    `healthy`; `degraded`: the last call failed, or a model is down; `unhealthy`: no call succeeds. A model is unhealthy
    while its breaker is not closed, an agent when all its models are. The column `fails` counts failed calls in a row.

    With --since it also shows what each agent did, from ClickHouse, and what it spent today, from Redis.

    For example:

        breakwater agents list

        breakwater agents list --since 7d

        breakwater agents list --json | jq -r '.[] | select(.health == "unhealthy") | .agent_id'
    """
    begin = None if since is None else formats.since(since, datetime.now(UTC))
    document, agents = api.get(list[AgentHealth], "agents")
    figures = None
    if begin is not None:
        plane = PlaneLocation(api.data)
        figures = run(_figures(plane.clickhouse_url, plane.redis_url, plane.config(config), begin))
        for error in figures.missing:
            output.note(error.message)
    names = [agent.agent_id for agent in agents]
    if api.as_json:
        if figures is not None:
            document = [
                *(agent | _figures_json(agent["agent_id"], figures) for agent in document),
                *(
                    {"agent_id": name, "health": None, **_figures_json(name, figures)}
                    for name in _removed(names, figures)
                ),
            ]
        output.json_document(document)
    else:
        rows = [one for agent in agents for one in (agent, *agent.models)]
        output.table(HEALTH, rows, empty="no agents are configured")
        if figures is not None:
            output.write("")
            _show_figures(names, figures)
    if figures is not None and len(figures.missing) == 2:
        raise typer.Exit(ExitCode.UNREACHABLE)


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name that programs use.")],
    model: Annotated[str, typer.Option("--model", help="Model to call.")],
    fallback: Annotated[
        list[str] | None, typer.Option("--fallback", metavar="MODEL", help="Fallback model. Repeatable.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="System prompt for all jobs.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Maximum tokens of an answer.")] = None,
    daily_usd: Annotated[
        str | None, typer.Option("--daily-usd", parser=usd, help="Hard cap on the spend per day, in USD.")
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option("--guard", metavar="PRESET", help="Preset of its task guard: agent-run for agents that loop."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--config", "-c", help=OWN_CONFIG)] = None,
    data: DataOption = None,
) -> None:
    """Add an agent to the config file, keeping comments and order. Nothing is written unless the result is valid.

    If `breakwater up` runs with this file, the command returns when the agent can be called.

    For example:

        breakwater agents add translator --model gpt-5-mini --daily-usd 2

        breakwater agents add triage --model gpt-5 --fallback gpt-5-mini --system-prompt "Answer in one sentence."

        breakwater agents add researcher --model gpt-5-mini --guard agent-run
    """
    from breakwater.cli.config_check import warnings_of_agent
    from breakwater.config import load_config, parse_config

    path = own_config(file)
    if name in load_config(path).agents:
        raise wrong_usage(f"{path} already has an agent {name}")
    if guard is not None and guard not in GUARD_PRESETS:
        raise wrong_usage(f"there is no preset {guard!r} of guards", f"Presets: {', '.join(GUARD_PRESETS)}.")
    agent = StartingAgent(name, model, fallback or (), system_prompt, max_tokens, daily_usd, guard)
    try:
        text = with_agent(path.read_bytes().decode(), agent)
    except ValueError as error:
        raise CliError("not_added", f"{path} has no block of agents to add to", f"Add this to it:\n{error}") from None
    config = parse_config(text, source=f"{path} with this agent")
    with written(path) as out:
        out.write(text.encode())
    for warning in warnings_of_agent(config, name):
        output.note(warning, "yellow")
    plane = PlaneLocation(data or DEFAULT_DATA)
    if running := plane.runs_with(path):
        run(_until_listed(plane, name, path), waiting=f"{path} is written; waiting for the running plane to apply it")
    applied = ", which the running plane has applied" if running else ""
    output.styled((f"Added {name} to {path}", "green"), f"{applied}. Next:")
    where = "" if data is None else f" --data {shlex.quote(str(data))}"
    if not running:
        named = "" if str(path) == "breakwater.yaml" else f" --config {shlex.quote(str(path))}"
        output.styled((f"  {program()} up{named}{where}", "bold"))
    output.styled((f'  {program()} submit {shlex.quote(name)} "Write a haiku about harbours."{where}', "bold"))


APPLIED_S = 20.0


async def _until_listed(plane: PlaneLocation, agent: str, file: Path) -> None:
    """Returns when the HTTP API lists an agent. Raises CliError: it does not within `APPLIED_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(APPLIED_S), plane.api_client() as client:
            while True:
                with suppress(ApiError):
                    if any(one["agent_id"] == agent for one in await client.get("agents", {}, timeout_s=APPLIED_S)):
                        return
                await asyncio.sleep(0.2)
    raise CliError(
        "not_applied",
        f"{agent} was added to {file}, but the running plane has not applied it after {APPLIED_S:g} s",
        "The output of `breakwater up` says why.",
    )


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Figures of agents; None if ClickHouse or Redis, which hold them, do not answer."""

    summaries: Mapping[str, AgentSummary] | None
    spent_today: Mapping[str, int] | None
    """Nano-dollars, by agent, for those that spent."""
    missing: tuple[CliError, ...]


async def _figures(clickhouse_url: str, redis_url: str, config: Config, since: datetime) -> AgentFigures:
    """Asks both at the same time. Raises nothing where one of them does not answer."""
    summaries, spent = await asyncio.gather(
        _summaries(clickhouse_url, since), _spent_today(redis_url, config), return_exceptions=True
    )
    return AgentFigures(
        None if isinstance(summaries, BaseException) else summaries,
        None if isinstance(spent, BaseException) else spent,
        tuple(expected(answer) for answer in (summaries, spent) if isinstance(answer, BaseException)),
    )


def _show_figures(agents: Sequence[str], figures: AgentFigures) -> None:
    """Prints a row for each agent, and for each that has run and is no longer configured."""
    summaries, spent = figures.summaries, figures.spent_today

    def of(show: Callable[[AgentSummary], Value]) -> Callable[[str], Value]:
        return lambda name: None if (found := (summaries or {}).get(name)) is None else show(found)

    def runs(name: str) -> int | None:
        return None if summaries is None else summaries[name].executions if name in summaries else 0

    columns: list[Column[str]] = [
        Column("agent", lambda name: name if name in agents else (f"{name} (not configured)", "faint")),
        Column("runs", runs, "count", drop=2),
        Column("ok", of(_rate), right=True, drop=1),
        Column("p50", of(lambda one: one.p50_ms), "duration", drop=6),
        Column("p95", of(lambda one: one.p95_ms), "duration", drop=5),
        Column(
            "retried/fell back/refused",
            of(lambda one: f"{one.retries}/{one.fallbacks}/{one.short_circuits}"),
            right=True,
            drop=8,
        ),
        Column("cost", of(lambda one: formats.at_least(one.spend, one.unknown_costs)), right=True, drop=4),
        Column("wasted", of(lambda one: money(one.wasted)), right=True, drop=7),
        Column("today", lambda name: None if spent is None else money(spent.get(name, 0)), right=True, drop=3),
    ]
    output.table(columns, [*agents, *_removed(agents, figures)], empty="no agents")


def _figures_json(agent: str, figures: AgentFigures) -> dict[str, Any]:
    """An agent's figures for programs; None where they are not known."""
    summary, spent = (figures.summaries or {}).get(agent), figures.spent_today
    known: dict[str, Any] | None = None
    if summary is not None:
        known = asdict(summary) | {
            "success_rate": summary.success_rate,
            "spend": formats.exact(summary.spend),
            "wasted": formats.exact(summary.wasted),
        }
    return {"figures": known, "spent_today": None if spent is None else formats.exact(spent.get(agent, 0))}


def _removed(agents: Sequence[str], figures: AgentFigures) -> list[str]:
    """The agents that have run, and are no longer configured."""
    return sorted(set(figures.summaries or ()) - set(agents))


async def _summaries(url: str, since: datetime) -> dict[str, AgentSummary]:
    from breakwater.analytics.figures import agent_summaries

    async with connect.analytics(url) as analytics:
        return {summary.agent: summary for summary in await agent_summaries(analytics, since=since)}


async def _spent_today(url: str, config: Config) -> dict[str, int]:
    from breakwater.policy.budget import period
    from breakwater.state.budget_counters import BudgetCounters

    zone = config.budgets.zone
    async with connect.state(url) as redis:
        snapshot = await BudgetCounters(redis, zone).snapshot([period("daily", datetime.now(UTC), zone)])
    sums = snapshot.periods[0].figures
    return {key.removeprefix("agent:"): one.spent for key, one in sums.items() if key.startswith("agent:")}


def _rate(summary: AgentSummary) -> Cell:
    rate = summary.success_rate
    if rate is None:
        return ""
    # Rounded down: 99.96 % is not all.
    text = f"{int(rate * 1000) / 10:.1f} %"
    return (text, "good" if rate >= 0.99 else "warn" if rate >= 0.9 else "bad")
