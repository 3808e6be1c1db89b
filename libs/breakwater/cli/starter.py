"""The text of a first config file, and of an agent that is added to one. Comments and order of a file are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FREE = {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0}


@dataclass(frozen=True, slots=True)
class StartingProvider:
    """A provider for a first config.

    Attributes:
        name: in the config.
        base_url: up to and including /v1.
        key_env: the environment variable that has its key; None where it needs none.
        kind: of provider.
        is_local: it is a model server on this machine, where calls cost nothing.
        models: that it lists.
    """

    name: str
    base_url: str
    key_env: str | None = None
    kind: str = "openai"
    is_local: bool = False
    models: Sequence[str] = ()

    def __str__(self) -> str:
        if self.is_local:
            return f"{self.name} at {self.base_url}"
        return f"{self.base_url} ({self.key_env})" if self.key_env else self.base_url


@dataclass(frozen=True, slots=True)
class StartingAgent:
    """An agent for a config; what is not set is left to the file's defaults."""

    name: str
    model: str
    fallback_models: Sequence[str] = field(default_factory=tuple)
    system_prompt: str | None = None
    max_tokens: int | None = None
    daily_usd: str | None = None


def config_text(provider: StartingProvider, agent: StartingAgent, *, priced: bool) -> str:
    """A config with one provider and one agent.

    Args:
        provider: who serves the model.
        agent: the agent.
        priced: whether the price of its model is known. A hard budget refuses calls of a model without a price.
    """
    from breakwater.policy.breaker import PRESETS

    kind = f"    kind: {provider.kind}\n" if provider.kind != "openai" else ""
    key = f"    api_key: {{env: {provider.key_env}}}   # read from the environment; never write a key in here\n"
    free = f"""models:
  {_scalar(agent.model)}:
    price: {_scalar(FREE)}   # on this machine
"""
    cap = agent.daily_usd if agent.daily_usd is not None else "1.00"
    hard = f"    budget: {{daily_usd: {cap}, enforcement: hard}}   # a call that could exceed it is not made\n"
    soft = f"""    # No price is known for this model: its cost is recorded as unknown. With one, a hard budget holds:
    # models: {{{_scalar(agent.model)}: {{price: {{input_usd_per_mtok: 0.10, output_usd_per_mtok: 0.40}}}}}}
    budget: {{daily_usd: {cap}, enforcement: soft}}
"""
    return f"""\
# Breakwater's config. `breakwater config check` checks it, and shows what all else is set to by default: retries, a
# circuit breaker, a guard on each task, redaction of secrets. `preset` sets breaker and guard of an agent, as in
# `breaker: {{preset: refactor}}`: {", ".join(PRESETS)}.
providers:
  {_scalar(provider.name)}:
{kind}    base_url: {_scalar(provider.base_url)}
{key if provider.key_env else ""}{free if provider.is_local else ""}defaults:
  provider: {_scalar(provider.name)}
agents:                 # `breakwater agents add NAME --model MODEL` adds one
  {_scalar(agent.name)}:
    model: {_scalar(agent.model)}
    max_tokens: {agent.max_tokens or 1000}    # of an answer
{hard if priced or provider.is_local else soft}"""


def with_agent(text: str, agent: StartingAgent) -> str:
    """The text of a config with one more agent, above the others.

    Raises:
        ValueError: it has no block of agents to add to; the text says which lines are to be added.
    """
    given: dict[str, Any] = {
        "model": agent.model,
        "fallback_models": list(agent.fallback_models) or None,
        "system_prompt": agent.system_prompt,
        "max_tokens": agent.max_tokens,
    }
    lines = [f"  {name}: {_scalar(value)}" for name, value in given.items() if value is not None]
    if agent.daily_usd is not None:
        lines.append(f"  budget: {{daily_usd: {agent.daily_usd}, enforcement: hard}}")
    block = [f"{_scalar(agent.name)}:", *lines]
    at = _first_agent(text)
    if at is None:
        raise ValueError("\n".join(block))
    row, indent = at
    all_lines = text.splitlines(keepends=True)
    return "".join([*all_lines[:row], *(f"{' ' * indent}{line}\n" for line in block), *all_lines[row:]])


def _first_agent(text: str) -> tuple[int, int] | None:
    """The line below `agents:`, and how far its entries are indented; None where they are not a block."""
    import yaml

    document = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode):
        return None
    for key, value in document.value:
        if key.value == "agents" and isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            return key.start_mark.line + 1, value.value[0][0].start_mark.column
    return None


def _scalar(value: object) -> str:
    """A value in one line of YAML."""
    import yaml

    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # YAML would spread it over lines
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
