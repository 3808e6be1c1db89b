"""`breakwater config`: checks the config file, applies it, and prints what follows from it.

Commands import the clients of servers when they need them: an editor or a commit hook runs `config check` often.
"""

from __future__ import annotations

import getpass
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer
from pydantic import BaseModel

from breakwater.config import Agent, Config, load_config, require_usable, unset_variables
from breakwater.config.deployments import Deployment
from breakwater.config.mistakes import shared_caps, warnings
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.formats import quantity
from breakwater.kernel.commands.output import Column
from breakwater.limits.settings import Caps
from breakwater.limits.views import LIMITS, limit_document
from breakwater.local.plane import EDITED_CONFIG_HELP, JsonOption, config_to_edit

FileArgument = Annotated[Path | None, typer.Argument(metavar="[FILE]", help=EDITED_CONFIG_HELP)]

app = typer.Typer(help="Check the config file, and print what follows from it.", no_args_is_help=True)


_OF_BREAKER = ("errors", "within_s", "consecutive_failures", "same_error", "failure_rate", "cooldown_s")


class _NamedAgent(NamedTuple):
    """An agent of the config, with its name."""

    name: str
    agent: Agent


@app.command("nats-users")
def nats_users(file: FileArgument = None) -> None:
    """Print the accounts and users of NATS, including those of the config's `programs`, for your own nats-server.

    Passwords are variables, such as BW_NATS_PROGRAM_BILLING_PASSWORD. `breakwater up` needs none of this.

    For example:

        breakwater config nats-users > deploy/nats/users.conf
    """
    from breakwater.kernel.nats.permissions import program, with_variables

    config = load_config(config_to_edit(file))
    programs = [program(name, settings.agents) for name, settings in config.programs.items()]
    typer.echo(f"# Printed by `breakwater config nats-users`.\n{with_variables(programs)}", nl=False)


@app.command()
def check(
    file: FileArgument = None,
    secrets: Annotated[
        bool, typer.Option("--secrets", help="Also check that the secrets and programs named in the file are here.")
    ] = False,
    expand: Annotated[
        bool,
        typer.Option("--expand", help="Show all deployments of models, and all limits in one table."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a config file, and show the effective settings of its agents.

    Lists all errors, each with its path and a fix, and exits with code 1.

    For example:

        breakwater config check

        breakwater config check --expand

        breakwater config check deploy/breakwater.yaml --json | jq '.agents[].models'
    """
    path = config_to_edit(file)
    config = load_config(path)
    if secrets:
        require_usable(path, config)
    unset = (
        f"{place}: the environment variable {variable} is not set here; set it where the services start"
        for place, variable in unset_variables(config).items()
    )
    all_warnings = (*warnings(config), *unset)
    limits = [limit_document(limit) for limit in config.limit_table.limits] if expand else []
    deployments = config.listed_deployments if expand else ()
    if as_json:
        document: dict[str, Any] = {
            "file": str(path),
            "ok": True,
            "agents": effective(config),
            "warnings": all_warnings,
        }
        output.json_document(
            document
            | (
                {"limits": limits, "deployments": [_deployment_document(deployment) for deployment in deployments]}
                if expand
                else {}
            )
        )
        return
    output.print_styled((f"{path}: ", ""), ("ok", "green"), (f", {quantity(len(config.agents), 'agent')}", ""))
    if deployments:
        output.table(_DEPLOYMENTS, deployments, width_in_pipe=100)
    if expand:
        output.table(LIMITS, config.limit_table.limits, empty="no limits", width_in_pipe=100)
    else:
        _show_agents(config)
    for warning in all_warnings:
        output.note(warning, "yellow")


_DEPLOYMENTS: Sequence[Column[Deployment]] = (
    Column("model", lambda deployment: deployment.model),
    Column("deployment", lambda deployment: deployment.id),
    Column("key", lambda deployment: deployment.key_name, missing="of the provider"),
    Column("weight", lambda deployment: f"{deployment.settings.weight:g}" if deployment.settings else None),
    Column("role", lambda deployment: deployment.settings and deployment.settings.role),
    Column("region", lambda deployment: deployment.region),
)


def _deployment_document(deployment: Deployment) -> dict[str, object]:
    settings = {} if deployment.settings is None else deployment.settings.model_dump(mode="json", exclude={"key"})
    names = {"model": deployment.model, "deployment": deployment.id, "key": deployment.key_name}
    return {**names, **settings, "name": deployment.name}


def _show_agents(config: Config) -> None:
    """Prints the effective settings of the agents, and what they share."""
    columns: list[Column[_NamedAgent]] = [
        Column("agent", lambda row: row.name),
        Column("models", lambda row: " > ".join(row.agent.chain)),
        Column("retry", lambda row: _retry(row.agent), drop=2),
        Column("budget", lambda row: _budget(row.agent), drop=1),
        Column("calls", lambda row: _calls(row.agent), below=True),
        Column("breaker", lambda row: settings_in_words(row.agent.breaker, always=_OF_BREAKER), below=True),
        Column("guard", lambda row: settings_in_words(row.agent.guard), below=True),
        Column("rate limit", lambda row: _rate_limits(config, row.agent), below=True),
    ]
    named_agents = (_NamedAgent(name, agent) for name, agent in config.agents.items())
    output.table(columns, named_agents, width_in_pipe=100)
    for name, caps in shared_caps(config).items():
        output.write(f"{name}: {_caps(caps)}, days in {config.budgets.timezone}")
    if keys := config.encryption.keys:
        output.write(f"encryption: on; the first of {quantity(len(keys), 'key')} encrypts, all decrypt")
    elif private := config.private_agents:
        output.write(
            f"texts of {', '.join(private)}: dead letters and results contain them encrypted with the plane's own "
            "key, or not at all if BREAKWATER_PLANE_KEY is not set (`breakwater up` creates it)"
        )


@app.command()
def apply(
    file: FileArgument = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Name for the audit log. [default: your user]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a config file, prepare NATS and ClickHouse for it, and notify people of what it changes.

    Then send SIGHUP to the services: each loads the file, while running jobs keep the config that they started with.
    `breakwater up` does all of this automatically when its file is saved. Both say what the change would have done with
    the jobs of the last 24 hours, if that is known within 5 s.

    For example, with containers:

        docker compose run --rm setup breakwater config apply

        docker compose kill --signal HUP request worker breaker budget alerter sink console
    """
    from breakwater.config.servers import apply_to_servers
    from breakwater.kernel.process.settings import Settings
    from breakwater.replay.summary import HEADING, summary_of_change

    path = config_to_edit(file)
    config = load_config(path)
    settings = Settings()
    applied, before = run(apply_to_servers(settings, config, by or getpass.getuser()))

    def summary() -> tuple[str, ...]:
        url = settings.clickhouse_url.get_secret_value()
        return (
            () if before is None else run(summary_of_change(url, before, config), waiting="trying it on recorded jobs")
        )

    if as_json:
        output.json_document({**asdict(applied), "summary": summary()})
        return
    output.print_styled(
        (f"version {applied.version} ", "bold"), "is applied" if applied.before else "is the first one applied"
    )
    for line in (*applied.server_changes, *applied.changes):
        output.write(f"  {line}")
    # It is applied already, whatever this says and however long it takes.
    if lines := summary():
        output.write(f"  {HEADING}")
    for line in lines:
        output.write(f"    {line}")
    output.note("Now send SIGHUP to the services; `breakwater doctor` names those that still use another version.")


def effective(config: Config) -> dict[str, object]:
    """The effective settings of the agents, by name: every default is filled in."""
    return {
        name: {
            "models": [
                {
                    "model": model,
                    "provider": config.provider_name(agent, model),
                    "rate_limit": config.models[model].rate_limit if model in config.models else None,
                }
                for model in agent.chain
            ],
            **agent.model_dump(mode="json", exclude={"model", "fallback_models", "provider", "system_prompt"}),
        }
        for name, agent in config.agents.items()
    }


def _calls(agent: Agent) -> str:
    return f"{agent.concurrency} in parallel, {agent.timeout_s:g} s each, {agent.total_timeout_s:g} s for a job"


def _retry(agent: Agent) -> str:
    retry = agent.retry
    if retry.max_attempts == 1:
        return "once"
    ceiling = f"-{retry.max_delay_s:g}" if retry.backoff == "exponential" else ""
    return f"{retry.max_attempts}x, {retry.base_s:g}{ceiling} s"


def _rate_limits(config: Config, agent: Agent) -> str:
    """Lists the agent's own rate limit, and those of its models, which it shares with other agents."""
    limits_of_models = [
        f"{model}: {settings_in_words(settings.rate_limit)}"
        for model in agent.chain
        if (settings := config.models.get(model)) is not None and settings.rate_limit is not None
    ]
    own_limit = [] if agent.rate_limit is None else [settings_in_words(agent.rate_limit)]
    return "; ".join([*own_limit, *limits_of_models])


def _budget(agent: Agent) -> str:
    text = _caps(agent.budget)
    return text if agent.max_cost_usd is None else f"{text}; {formats.exact_money(agent.max_cost_usd)} a job"


def _caps(caps: Caps) -> str:
    windows = [
        f"{formats.exact_money(limit)}/{unit}"
        for limit, unit in ((caps.daily_usd, "day"), (caps.monthly_usd, "month"))
        if limit is not None
    ]
    return f"{', '.join(windows)} {caps.enforcement}" if windows else "no limit"


def settings_in_words(settings: BaseModel | None, always: Collection[str] | None = None) -> str:
    """Writes settings with their names in the config: `consecutive_failures: 3, same_error: 5, within_s: 60`.

    Args:
        settings: the settings; None if they are switched off.
        always: the settings to write even if they have their defaults; None for all.
    """
    if settings is None:
        return "off"
    values = settings.model_dump(mode="json", exclude_none=True)
    if always is not None:
        unusual = settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        values = {name: value for name, value in values.items() if name in always or name in unusual}
    return _names_and_values(values)


def _names_and_values(settings: dict[str, Any]) -> str:
    def text(name: str, value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{_names_and_values(cast(dict[str, Any], value))}}}"
        if name.endswith("_usd"):
            return formats.exact_money(value)
        return f"{value:g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value).lower()

    return ", ".join(f"{name}: {text(name, value)}" for name, value in settings.items() if value not in ([], {}))
