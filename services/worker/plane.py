"""What a worker process has at hand: the config compiled once, and the rooms it calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Agent, Config
from breakwater.metrics import WorkerMetrics
from breakwater.outage import Outages
from breakwater.policy.budget import CapTable
from breakwater.policy.estimate import estimate_input_tokens
from breakwater.policy.input_size import InputSize
from breakwater.policy.output import OutputGuard
from breakwater.policy.price import Usage
from breakwater.policy.redact import Redactor
from breakwater.providers.base import LocalSettings, Provider, ProviderSettings
from breakwater.state.breakers import Breakers
from breakwater.state.budgets import Budgets
from breakwater.state.cache import AnswerCache
from breakwater.state.connection import Redis
from breakwater.state.executions import Executions
from breakwater.state.rate_limits import Limited, RateLimits
from breakwater.state.retry_budget import RetryBudgets
from breakwater.state.tasks import Tasks
from services.worker.holdings import Holdings
from services.worker.prices import PriceBook, token_rules


def utc_now() -> datetime:
    """The clock of a worker."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Plane:
    """Everything a job's run needs. Clock and randomness are here, so that the decisions stay pure."""

    config: Config
    providers: Mapping[str, Provider]
    publisher: Publisher
    lookup: Lookup
    redis: Redis
    executions: Executions
    breakers: Breakers
    budgets: Budgets
    retry_budgets: RetryBudgets
    cache: AnswerCache
    prices: PriceBook
    redactor: Redactor
    outages: Outages
    metrics: WorkerMetrics
    tasks: Tasks
    rate_limits: RateLimits
    output_guards: Mapping[str, OutputGuard]
    """Of the agents that have an output schema."""
    caps: Callable[[], CapTable]
    """Gives the caps that hold now."""
    holdings: Holdings
    """What its calls under way hold in the budgets."""
    now: Callable[[], datetime] = utc_now
    jitter: Callable[[], float] = random.random

    def limits(self, name: str, agent: Agent, model: str) -> tuple[Limited, ...]:
        """The rate limits that a call is held to."""
        settings = self.config.models.get(model)
        rules = ((f"agent:{name}", agent.rate_limit), (f"model:{model}", settings and settings.rate_limit))
        return tuple(Limited(who, rule) for who, rule in rules if rule is not None)

    def input_tokens(self, agent: Agent, model: str, size: InputSize) -> int:
        """A high estimate of what a call's input will be counted as."""
        return estimate_input_tokens(size, token_rules(self.config, agent, model))

    def worst_case(self, agent: Agent, model: str, size: InputSize, max_tokens: int) -> int | None:
        """The most that a call can cost in nano-dollars; None where that is not known.

        Args:
            agent: who calls.
            model: the one to call.
            size: what is sent.
            max_tokens: the most it may answer, over all its choices.
        """
        provider = self.config.providers.get(self.config.provider_name(agent, model) or "")
        if isinstance(provider, LocalSettings) and provider.cost_per_call_usd is not None:
            return provider.cost_per_call_usd
        if not self._has_price(provider, model):
            return None
        return self.prices.worst_case(model, self.input_tokens(agent, model, size), max_tokens)

    def cost(self, provider: str, model: str, usage: Usage) -> int | None:
        """What a call has cost in nano-dollars by what it has used; None where that is not known."""
        settings = self.config.providers.get(provider)
        return self.prices.cost(model, usage) if self._has_price(settings, model) else None

    def _has_price(self, provider: ProviderSettings | None, model: str) -> bool:
        # A program's name may happen to be that of a model in the price list.
        settings = self.config.models.get(model)
        return not isinstance(provider, LocalSettings) or (settings is not None and settings.price is not None)


def plane_for(
    config: Config,
    caps: Callable[[], CapTable],
    *,
    redis: Redis,
    publisher: Publisher,
    lookup: Lookup,
    providers: Mapping[str, Provider],
) -> Plane:
    """The plane of a worker, from its connections and what its config compiles to."""
    budgets = Budgets(redis, config.budgets.zone)
    return Plane(
        config=config,
        providers=providers,
        publisher=publisher,
        lookup=lookup,
        redis=redis,
        executions=Executions(redis),
        breakers=Breakers(redis),
        budgets=budgets,
        retry_budgets=RetryBudgets(redis, config.retry_budget),
        cache=AnswerCache(redis),
        prices=PriceBook(config.models),
        redactor=Redactor.compile(config.redaction),
        outages=Outages(),
        metrics=WorkerMetrics(config.known_models),
        tasks=Tasks(redis),
        rate_limits=RateLimits(redis),
        caps=caps,
        holdings=Holdings(redis, budgets, caps, utc_now),
        output_guards={
            name: OutputGuard.compile(agent.output) for name, agent in config.agents.items() if agent.output is not None
        },
    )
