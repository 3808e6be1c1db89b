"""`breakwater config`: the config file, checked as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from breakwater.cli import formats, output, rules_in_words
from breakwater.cli.plane import JsonOption

if TYPE_CHECKING:
    from breakwater.config import Agent, Alerts, Config
    from breakwater.policy.addresses import Network
    from breakwater.policy.budget import Caps

app = typer.Typer(help="Check the config file.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="[default: $BREAKWATER_CONFIG, breakwater.yaml]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a config file, and show the agents as they will run.

    Lists every mistake at once, each with its path and what would be right, and ends with code 1. Reads no secrets:
    `breakwater doctor` tells whether those that the file names are there.

    For example:

        breakwater config check

        breakwater config check deploy/breakwater.yaml --json | jq '.agents[].models'
    """
    from breakwater.config import load_config

    # Not the one that a running plane uses: it is about to be changed.
    path = file or Path(os.environ.get("BREAKWATER_CONFIG") or "breakwater.yaml")
    config = load_config(path)
    if as_json:
        output.json_document({"file": str(path), "ok": True, "agents": effective(config), "warnings": warnings(config)})
        return
    count = len(config.agents)
    output.styled((f"{path}: ", ""), ("ok", "green"), (f", {count} {'agent' if count == 1 else 'agents'}", ""))
    output.table(
        [
            output.Column("agent"),
            output.Column("models"),
            output.Column("retry", drop=2),
            output.Column("timeouts", drop=3),
            output.Column("at once", right=True, drop=4),
            output.Column("budget", drop=1),
            output.Column("breaker", below=True),
            output.Column("guard", below=True),
            output.Column("rate limit", below=True),
        ],
        [
            (
                name,
                " > ".join(agent.chain),
                _retry(agent),
                f"{agent.timeout_s:g} s, {agent.total_timeout_s:g} s in all",
                str(agent.concurrency),
                _budget(agent),
                rules_in_words.breaker(agent.breaker),
                rules_in_words.guard(agent.guard),
                _rate_limits(config, agent),
            )
            for name, agent in config.agents.items()
        ],
    )
    for name, caps in _shared_caps(config).items():
        output.write(f"{name}: {_caps(caps)}, days and months of {config.budgets.timezone}")
    for warning in warnings(config):
        output.note(warning, "yellow")


def warnings(config: Config) -> tuple[str, ...]:
    """What is allowed, and hardly meant."""
    every = {f"agents.{name}.budget": agent.budget for name, agent in config.agents.items()}
    found: list[str] = []
    for place, caps in {**every, **_shared_caps(config)}.items():
        daily, monthly = caps.daily_usd, caps.monthly_usd
        if caps.enforcement == "hard" and daily is None and monthly is None:
            found.append(f"{place}: is hard, and has no cap: nothing is refused; set daily_usd or monthly_usd")
        if daily is not None and monthly is not None and daily > monthly:
            found.append(f"{place}: a day may cost more than its month")
    return (*found, *_about_alerts(config.alerts))


def _about_alerts(alerts: Alerts) -> Iterable[str]:
    for name, channel in alerts.channels.items():
        # That a breaker has closed is told of every incident that was one.
        never = sorted({*(channel.events or ())} - {*alerts.on_events, "breaker_closed"})
        if never:
            yield f"alerts.channels.{name}.events: {', '.join(never)} is never told, as alerts.on_events lacks it"
        if channel.webhook is not None and (why := _refused(channel.webhook.url, alerts.allow_networks)) is not None:
            yield f"alerts.channels.{name}.webhook.url: is refused ({why}); alerts.allow_networks may allow it"


def _refused(url: str, allowed: Sequence[Network]) -> str | None:
    """Why nothing would be sent to a URL that has an address in place of a name."""
    from breakwater.policy.addresses import refusal

    try:
        address = ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return None
    return refusal(address, allowed)


def _shared_caps(config: Config) -> dict[str, Caps]:
    """Those of all agents, and of tenants, by their place in the file; what was left out is not told."""
    tenants = {f"budgets.tenants.{name}": caps for name, caps in config.budgets.tenants.items()}
    total = config.budgets.total
    return {**({"budgets.global": total} if total.model_fields_set else {}), **tenants}


def effective(config: Config) -> dict[str, object]:
    """The agents with every default filled in."""
    return {
        name: {
            "models": [_model(config, agent, model) for model in agent.chain],
            **agent.model_dump(mode="json", exclude={"model", "fallback_models", "provider", "system_prompt"}),
        }
        for name, agent in config.agents.items()
    }


def _model(config: Config, agent: Agent, model: str) -> dict[str, object]:
    settings = config.models.get(model)
    limit = None if settings is None else settings.rate_limit
    return {
        "model": model,
        "provider": config.provider_name(agent, model),
        "rate_limit": None if limit is None else limit.model_dump(mode="json"),
    }


def _retry(agent: Agent) -> str:
    retry = agent.retry
    if retry.max_attempts == 1:
        return "once"
    ceiling = f"-{retry.max_delay_s:g}" if retry.backoff == "exponential" else ""
    return f"{retry.max_attempts}x, {retry.base_s:g}{ceiling} s"


def _rate_limits(config: Config, agent: Agent) -> str:
    """The agent's own, and those of its models, which it shares with others."""
    own = rules_in_words.rate_limit(agent.rate_limit)
    shared = [
        f"{model}: {rules_in_words.rate_limit(settings.rate_limit)}"
        for model in agent.chain
        if (settings := config.models.get(model)) is not None and settings.rate_limit is not None
    ]
    return "; ".join(([] if shared and agent.rate_limit is None else [own]) + shared)


def _budget(agent: Agent) -> str:
    text = _caps(agent.budget)
    return text if agent.max_cost_usd is None else f"{text}; {formats.money(agent.max_cost_usd)} a job"


def _caps(caps: Caps) -> str:
    windows = [
        f"{formats.money(limit)}/{unit}"
        for limit, unit in ((caps.daily_usd, "day"), (caps.monthly_usd, "month"))
        if limit is not None
    ]
    return f"{', '.join(windows)} {caps.enforcement}" if windows else "no cap"
