"""The text of a first config, and of an agent that is added to a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from breakwater.breakers.settings import PRESETS
from breakwater.config import Config, parse_config
from breakwater.config.edit import flow_text
from breakwater.config.pricing import pricing_of
from breakwater.config.starting_providers import OPENAI, StartingProvider
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import replacing_file
from breakwater.kernel.formats import money
from breakwater.limits.settings import GuardRules

FREE_PRICE = {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0}


@dataclass(frozen=True, slots=True)
class StartingAgent:
    """An agent to add to a config. For settings that are None, the file's defaults apply."""

    name: str
    model: str
    fallback_models: Sequence[str] = field(default_factory=tuple)
    system_prompt: str | None = None
    max_tokens: int | None = None
    daily_usd: str | None = None
    guard: str | None = None
    """The preset of the agent's task guard."""


def simulated_config(file: Path) -> None:
    """Writes a first config for a simulation, which needs no API key. Raises CliError."""
    agent = StartingAgent("assistant", OPENAI.suggested_model or "", daily_usd="1.00")
    write_config(file, OPENAI, agent)
    output.note(f"Wrote {file}: the agent {agent.name} with {agent.model} of OpenAI, which is simulated.")


def write_config(file: Path, provider: StartingProvider, agent: StartingAgent) -> Config:
    """Writes a config with the provider and the agent, if it is valid. Raises ConfigError, CliError."""
    text = config_text(provider, agent, priced=True)
    config = parse_config(text, source="the config that this would be")
    if pricing_of(config, provider.name, agent.model) is None:
        text = config_text(provider, agent, priced=False)
        config = parse_config(text)
    with replacing_file(file) as out:
        out.write(text.encode())
    return config


def config_text(provider: StartingProvider, agent: StartingAgent, *, priced: bool) -> str:
    """Writes a config with one provider and one agent as YAML.

    Args:
        provider: the provider of the model.
        agent: the agent.
        priced: True if the price of the model is known. A hard budget refuses calls of a model without a price.
    """
    kind = f"    kind: {provider.kind}\n" if provider.kind != "openai" else ""
    url = f"    base_url: {flow_text(provider.base_url)}\n" if provider.base_url else ""
    further = "".join(f"    {name}: {flow_text(value)}\n" for name, value in provider.settings.items())
    key = f"    api_key: {{env: {provider.key_env}}}   # read from the environment; never write a key in here\n"
    free = f"""models:
  {flow_text(agent.model)}:
    price: {flow_text(FREE_PRICE)}   # on this machine
"""
    cap = agent.daily_usd if agent.daily_usd is not None else "1.00"
    hard = f"    budget: {{daily_usd: {cap}, enforcement: hard}}   # a call that could exceed it is not made\n"
    soft = f"""    # No price is known for this model: its cost is recorded as unknown. With one, a hard limit holds:
    # models: {{{flow_text(agent.model)}: {{price: {{input_usd_per_mtok: 0.10, output_usd_per_mtok: 0.40}}}}}}
    budget: {{daily_usd: {cap}, enforcement: soft}}
"""
    return f"""\
# Breakwater's config. `breakwater config check` checks it, and shows all other defaults: retries, a circuit breaker,
# redaction of secrets. `preset` sets breaker and guard of an agent, as in
# `breaker: {{preset: refactor}}`: {", ".join(PRESETS)}.
providers:
  {flow_text(provider.name)}:
{kind}{url}{further}{key if provider.key_env else ""}{free if provider.is_local else ""}defaults:
  provider: {flow_text(provider.name)}
agents:                 # `breakwater agents add NAME --model MODEL` adds one
  {flow_text(agent.name)}:
    model: {flow_text(agent.model)}
    max_tokens: {agent.max_tokens or 1000}    # of an answer
    {_guard(agent)}
{hard if priced or provider.is_local else soft}"""


def with_agent(text: str, agent: StartingAgent) -> str:
    """Adds an agent to the text of a config, above the others.

    Raises:
        ValueError: if the config has no block of agents; the message contains the lines to add.
    """
    settings: dict[str, Any] = {
        "model": agent.model,
        "fallback_models": list(agent.fallback_models) or None,
        "system_prompt": agent.system_prompt,
        "max_tokens": agent.max_tokens,
    }
    lines = [f"  {name}: {flow_text(value)}" for name, value in settings.items() if value is not None]
    if agent.guard is not None or "guard" not in (yaml.safe_load(text).get("defaults") or {}):
        lines.append(f"  {_guard(agent)}")
    if agent.daily_usd is not None:
        lines.append(f"  budget: {{daily_usd: {agent.daily_usd}, enforcement: hard}}")
    lines_to_add = [f"{flow_text(agent.name)}:", *lines]
    position = _first_agent_position(text)
    if position is None:
        raise ValueError("\n".join(lines_to_add))
    row, indent = position
    lines_of_text = text.splitlines(keepends=True)
    block = [f"{' ' * indent}{line}\n" for line in lines_to_add]
    return "".join([*lines_of_text[:row], *block, *lines_of_text[row:]])


def _guard(agent: StartingAgent) -> str:
    """Writes the guard of an agent as a line of YAML, with the limits of a task."""
    rules = GuardRules.model_validate({} if agent.guard is None else {"preset": agent.guard})
    cost = money(rules.max_cost_usd or 0)
    if agent.guard is not None:
        limits = f"{rules.max_iterations:,} iterations, {rules.max_tokens:,} tokens, {cost}"
        return f"guard: {{preset: {flow_text(agent.guard)}}}   # per task: {limits}"
    limits = f"max_iterations: {rules.max_iterations}, max_tokens: {rules.max_tokens}, max_cost_usd: {cost[1:]}"
    return f"guard: {{{limits}}}   # per task; for agents that loop: {{preset: agent-run}}"


def _first_agent_position(text: str) -> tuple[int, int] | None:
    """The index of the line below `agents:`, and the indentation of its entries; None if they are not a block."""
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode):
        return None
    for key, value in document.value:
        if key.value == "agents" and isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            return key.start_mark.line + 1, value.value[0][0].start_mark.column
    return None
