"""`breakwater agents`: shows the health of agents and models, with --since also runs and costs; adds agents."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from breakwater.breakers.contract import AgentHealth
from breakwater.breakers.settings import GUARD_PRESETS
from breakwater.client import ApiError
from breakwater.client.commands import Api, DefaultListGroup, api_command
from breakwater.config.first_config import StartingAgent, with_agent
from breakwater.health.views import HEALTH
from breakwater.kernel.columns import Cell, Column, Value
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import CliError, ExitCode, replacing_file, usage_error
from breakwater.kernel.commands.formats import breakwater_command, usd
from breakwater.kernel.formats import money, percent
from breakwater.kernel.types import format_time
from breakwater.local.plane import (
    DEFAULT_DATA,
    EDITED_CONFIG_HELP,
    DataOption,
    PlaneLocation,
    config_to_edit,
)
from breakwater.records.contract import AgentFigures, AgentFiguresList

_HELP = """Show the health of agents, and add agents to the config. Alone, it is `breakwater agents list`.
"""

app = typer.Typer(cls=DefaultListGroup, help=_HELP)


@app.command("list")
@api_command
def agents(
    api: Api,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="AGO", help="Also show runs, latency and cost since: 1h, 24h, 7d, or a time."),
    ] = None,
) -> None:
    """Show the health of every agent, and of each of its models.

    `healthy`; `degraded`: the last call failed, or a model is down; `unhealthy`: no call succeeds. A model is unhealthy
    while its breaker is not closed, an agent when all its models are. The column `fails` counts failed calls in a row.

    With --since it also shows what each agent did, as ClickHouse counts it, and what it spent today, as Redis does.

    For example:

        breakwater agents list

        breakwater agents list --since 7d

        breakwater agents list --json | jq -r '.[] | select(.health == "unhealthy") | .agent_id'
    """
    begin = None if since is None else formats.since(since, datetime.now(UTC))
    agents_json, agents = api.get(list[AgentHealth], "agents")
    names = [agent.agent_id for agent in agents]
    figures = None
    if begin is not None:
        _, figures = api.get(AgentFiguresList, "agents/figures", since=format_time(begin))
        for reason in figures.missing:
            output.note(reason)
    if api.as_json:
        if figures is not None:
            agents_json = [
                *(agent | _figures_json(agent["agent_id"], figures) for agent in agents_json),
                *(
                    {"agent_id": name, "health": None, **_figures_json(name, figures)}
                    for name in _removed_agents(names, figures)
                ),
            ]
        output.json_document(agents_json)
    else:
        rows = [row for agent in agents for row in (agent, *agent.models)]
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
        str | None, typer.Option("--daily-usd", parser=usd, help="Hard limit on the spend per day, in USD.")
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option("--guard", metavar="PRESET", help="Preset of its task guard: agent-run for agents that loop."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--config", "-c", help=EDITED_CONFIG_HELP)] = None,
    data: DataOption = None,
) -> None:
    """Add an agent to the config file, keeping comments and order. Nothing is written unless the result is valid.

    If `breakwater up` runs with this file, the command returns when the agent can be called.

    For example:

        breakwater agents add translator --model gpt-5-mini --daily-usd 2

        breakwater agents add triage --model gpt-5 --fallback gpt-5-mini --system-prompt "Answer in one sentence."

        breakwater agents add researcher --model gpt-5-mini --guard agent-run
    """
    from breakwater.config import load_config, parse_config, unset_variables
    from breakwater.config.mistakes import warnings_of_agent

    path = config_to_edit(file)
    if name in load_config(path).agents:
        raise usage_error(f"{path} already has an agent {name}")
    if guard is not None and guard not in GUARD_PRESETS:
        raise usage_error(f"there is no preset {guard!r} of guards", f"Presets: {', '.join(GUARD_PRESETS)}.")
    agent = StartingAgent(name, model, fallback or (), system_prompt, max_tokens, daily_usd, guard)
    try:
        text = with_agent(path.read_bytes().decode(), agent)
    except ValueError as error:
        raise CliError("not_added", f"{path} has no block of agents to add to", f"Add this to it:\n{error}") from None
    config = parse_config(text, source=f"{path} with this agent")
    with replacing_file(path) as out:
        out.write(text.encode())
    for warning in warnings_of_agent(config, name):
        output.note(warning, "yellow")
    plane = PlaneLocation(data or DEFAULT_DATA)
    if running := plane.runs_with(path):
        run(_until_listed(plane, name, path), waiting=f"{path} is written; waiting for the running plane to apply it")
    applied = ", which the running plane has applied" if running else ""
    output.print_styled((f"Added {name} to {path}", "green"), f"{applied}. Next:")
    data_option = "" if data is None else f" --data {shlex.quote(str(data))}"
    if not running:
        if plane.running_config is not None:
            output.note(f"The plane that is running here uses {plane.running_config}; stop it first:", "yellow")
        for variable in unset_variables(config).values():
            output.print_styled((f"  export {variable}=…", "bold"))
        config_option = "" if str(path) == "breakwater.yaml" else f" --config {shlex.quote(str(path))}"
        output.print_styled((f"  {breakwater_command()} up{config_option}{data_option}", "bold"))
    output.print_styled(
        (f'  {breakwater_command()} submit {shlex.quote(name)} "Write a haiku about harbours."{data_option}', "bold")
    )


APPLY_TIMEOUT_S = 20.0


async def _until_listed(plane: PlaneLocation, agent: str, file: Path) -> None:
    """Waits until the HTTP API lists an agent. Raises CliError if it does not within `APPLY_TIMEOUT_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(APPLY_TIMEOUT_S), plane.api_client() as client:
            while True:
                with suppress(ApiError):
                    listed_agents = await client.get("agents", {}, timeout_s=APPLY_TIMEOUT_S)
                    if any(entry["agent_id"] == agent for entry in listed_agents):
                        return
                await asyncio.sleep(0.2)
    raise CliError(
        "not_applied",
        f"{agent} was added to {file}, but the running plane has not applied it after {APPLY_TIMEOUT_S:g} s",
        "The output of `breakwater up` says why.",
    )


def _show_figures(agents: Sequence[str], figures: AgentFiguresList) -> None:
    """Prints a row for each configured agent, and for each that has run but is no longer configured."""
    figures_by_agent = _by_agent(figures)
    spent = figures.spent_today

    def from_figures(get: Callable[[AgentFigures], Value]) -> Callable[[str], Value]:
        def value(name: str) -> Value:
            return None if (of_agent := figures_by_agent.get(name)) is None else get(of_agent)

        return value

    def runs(name: str) -> int | None:
        return None if figures.agents is None else getattr(figures_by_agent.get(name), "executions", 0)

    columns: list[Column[str]] = [
        Column("agent", lambda name: name if name in agents else (f"{name} (not configured)", "faint")),
        Column("runs", runs, "count", drop=2),
        Column("ok", from_figures(_rate), align_right=True, drop=1),
        Column("p50", from_figures(lambda of_agent: of_agent.p50_ms), "duration", drop=6),
        Column("p95", from_figures(lambda of_agent: of_agent.p95_ms), "duration", drop=5),
        Column(
            "retried/fell back/refused",
            from_figures(lambda of_agent: f"{of_agent.retries}/{of_agent.fallbacks}/{of_agent.short_circuits}"),
            align_right=True,
            drop=8,
        ),
        Column(
            "on fallbacks", from_figures(lambda of_agent: percent(of_agent.fallback_share)), align_right=True, drop=9
        ),
        Column(
            "cost",
            from_figures(lambda of_agent: formats.at_least(of_agent.spend, of_agent.unknown_costs)),
            align_right=True,
            drop=4,
        ),
        Column("wasted", from_figures(lambda of_agent: money(of_agent.wasted)), align_right=True, drop=7),
        Column("today", lambda name: None if spent is None else money(spent.get(name, 0)), align_right=True, drop=3),
    ]
    output.table(columns, [*agents, *_removed_agents(agents, figures)], empty="no agents")


def _figures_json(agent: str, figures: AgentFiguresList) -> dict[str, Any]:
    """An agent's figures as JSON; unknown ones are None."""
    of_agent = _by_agent(figures).get(agent)
    spent_today = figures.spent_today
    return {
        "figures": of_agent and of_agent.model_dump(mode="json"),
        "spent_today": None if spent_today is None else formats.exact(spent_today.get(agent, 0)),
    }


def _by_agent(figures: AgentFiguresList) -> dict[str, AgentFigures]:
    return {of_agent.agent: of_agent for of_agent in figures.agents or ()}


def _removed_agents(agents: Sequence[str], figures: AgentFiguresList) -> list[str]:
    """The agents that have run but are no longer configured."""
    return sorted(_by_agent(figures).keys() - set(agents))


def _rate(figures: AgentFigures) -> Cell:
    rate = figures.success_rate
    if rate is None:
        return ""
    # Rounded down, so that 99.96 % does not read as 100 %.
    text = f"{int(rate * 1000) / 10:.1f} %"
    return (text, "good" if rate >= 0.99 else "warn" if rate >= 0.9 else "bad")
