"""The policy of a config, as a replay takes it."""

from __future__ import annotations

from breakwater.config import Config, breakers_of
from breakwater.config.pricing import deployment_pricing
from breakwater.replay.rules.history import AgentPolicy, Policy
from breakwater.replay.rules.prices import Prices


def policy_of(config: Config) -> Policy:
    """Returns the settings of a config that decide what jobs do."""
    agents = {
        name: AgentPolicy(
            chain=agent.chain,
            retry=agent.retry,
            breaker=agent.breaker,
            guard=agent.guard,
            timeout_s=agent.timeout_s,
            total_timeout_s=agent.total_timeout_s,
            max_cost=agent.max_cost_usd,
        )
        for name, agent in config.agents.items()
    }
    return Policy(
        agents,
        breakers_of(config, of_allowed=True),
        config.limit_table,
        config.budgets.zone,
        config.alerts,
        _prices_of(config),
    )


def _prices_of(config: Config) -> Prices:
    deployments = {
        deployment
        for agent in config.agents.values()
        for model in agent.chain
        for deployment in config.deployments(agent, model)
    }
    pricings = (((unit.unit, unit.provider), deployment_pricing(config, unit)) for unit in deployments)
    return {place: pricing for place, pricing in pricings if pricing is not None}
