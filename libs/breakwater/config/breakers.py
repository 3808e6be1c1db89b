"""Which breakers the agents of a config have."""

from __future__ import annotations

from collections.abc import Iterable

from breakwater.config.models import Agent, Config
from breakwater.policy.breaker import BreakerKey, BreakerRules


def breaker_of(config: Config, name: str, model: str) -> BreakerKey | None:
    """The breaker that an agent's calls of a model meet; None where the agent has none, or the model no provider."""
    agent = config.agents[name]
    provider = config.provider_name(agent, model)
    if agent.breaker is None or provider is None:
        return None
    return BreakerKey.of(agent.breaker.scope, name, model, provider)


def breakers_of(config: Config, *, of_allowed: bool = False) -> dict[BreakerKey, BreakerRules]:
    """The breakers of the agents' own models, with their rules; one that agents share has those of the first of them.

    Args:
        config: whose agents.
        of_allowed: also those of the models that a job may ask for, as far as the config names them.
    """
    found: dict[BreakerKey, BreakerRules] = {}
    for name, agent in config.agents.items():
        for model in _models(config, agent) if of_allowed else agent.chain:
            key = breaker_of(config, name, model)
            if key is not None and agent.breaker is not None:
                found.setdefault(key, agent.breaker)
    return found


def _models(config: Config, agent: Agent) -> Iterable[str]:
    named = config.known_models if "*" in agent.allowed_models else agent.allowed_models
    return dict.fromkeys((*agent.chain, *sorted(named)))
