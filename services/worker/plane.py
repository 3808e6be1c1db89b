"""What a worker process has at hand: the config compiled once, and the rooms it calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Agent, Config
from breakwater.metrics import WorkerMetrics
from breakwater.patience import Patience
from breakwater.policy.budget import Counter, counters
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
from services.worker.prices import PriceBook


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
    patience: Patience
    metrics: WorkerMetrics
    tasks: Tasks
    rate_limits: RateLimits
    output_guards: Mapping[str, OutputGuard]
    """Of the agents that have an output schema."""
    now: Callable[[], datetime] = utc_now
    jitter: Callable[[], float] = random.random
    _counters: dict[str, tuple[Counter, ...]] = field(default_factory=dict[str, "tuple[Counter, ...]"])

    def counters(self, name: str, agent: Agent) -> tuple[Counter, ...]:
        """The budgets that an agent's calls are held against."""
        if name not in self._counters:
            self._counters[name] = counters(name, agent.budget, self.config.budgets.total)
        return self._counters[name]

    def limits(self, name: str, agent: Agent, model: str) -> tuple[Limited, ...]:
        """The rate limits that a call is held to."""
        settings = self.config.models.get(model)
        rules = ((f"agent:{name}", agent.rate_limit), (f"model:{model}", settings and settings.rate_limit))
        return tuple(Limited(who, rule) for who, rule in rules if rule is not None)

    def worst_case(self, agent: Agent, model: str, input_bytes: int, max_tokens: int) -> int | None:
        """The most that a call can cost in nano-dollars; None where that is not known."""
        provider = self.config.providers.get(self.config.provider_name(agent, model) or "")
        if isinstance(provider, LocalSettings) and provider.cost_per_call_usd is not None:
            return provider.cost_per_call_usd
        return self.prices.worst_case(model, input_bytes, max_tokens) if self._has_price(provider, model) else None

    def cost(self, provider: str, model: str, usage: Usage) -> int | None:
        """What a call has cost in nano-dollars by what it has used; None where that is not known."""
        settings = self.config.providers.get(provider)
        return self.prices.cost(model, usage) if self._has_price(settings, model) else None

    def _has_price(self, provider: ProviderSettings | None, model: str) -> bool:
        # A program's name may happen to be that of a model in the price list.
        settings = self.config.models.get(model)
        return not isinstance(provider, LocalSettings) or (settings is not None and settings.price is not None)
