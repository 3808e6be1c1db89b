"""What the config makes of each model for each agent: who serves it, what it costs, and what limits it.

A model's price is the config's own, else that of the price list that comes with `genai-prices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import structlog

from breakwater.config import Config, ModelSettings
from breakwater.contracts.types import NANO_PER_USD
from breakwater.policy.breaker import BreakerKey
from breakwater.policy.price import Price, TokenRules, Usage, rules_for
from breakwater.providers.base import HttpSettings, LocalSettings
from breakwater.state.rate_limits import Limited

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider, TieredPrices

    Rate = Decimal | TieredPrices | None


MAX_KNOWN = 4096


class Pricing(Protocol):
    """The prices of one model."""

    def cost(self, usage: Usage) -> int | None:
        """What a call costs in nano-dollars; None where its usage was not reported."""
        ...

    def worst_case(self, input_tokens: int, max_tokens: int) -> int | None:
        """The most that a call can cost in nano-dollars, by a high estimate of its input."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """A model as an agent calls it."""

    model: str
    provider: str
    """Who serves it; empty where that is unknown."""
    name: str
    """What the provider calls it."""
    token_rules: TokenRules
    """How the tokens of a call are estimated."""
    pricing: Pricing | None
    """None where it has no price."""
    breaker: BreakerKey | None
    """None where the agent has its breakers switched off."""
    limits: tuple[Limited, ...]
    """The rate limits of the agent and of the model."""


class Targets:
    """The models of a config as its agents call them, each worked out once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Programs may name models that the config does not: the caches have an end.
        self.of: Callable[[str, str], Target] = lru_cache(MAX_KNOWN)(self._target)
        """A target, by its agent's name and its model's id."""
        self._pricing = lru_cache(MAX_KNOWN)(self._priced)

    def _target(self, agent_name: str, model: str) -> Target:
        config, agent, settings = self._config, self._config.agents[agent_name], self._config.models.get(model)
        provider = config.provider_name(agent, model) or ""
        rules = (
            (f"agent:{agent_name}", agent.rate_limit),
            (f"model:{model}", None if settings is None else settings.rate_limit),
        )
        return Target(
            model=model,
            provider=provider,
            name=config.name_at_provider(provider, model),
            token_rules=token_rules(config, provider, model),
            pricing=self._pricing(provider, model),
            breaker=None if agent.breaker is None else BreakerKey.of(agent.breaker.scope, agent_name, model, provider),
            limits=tuple(Limited(name, rule) for name, rule in rules if rule is not None),
        )

    def _priced(self, provider: str, model: str) -> Pricing | None:
        found = pricing_of(self._config, provider, model)
        if found is None and not self._config.is_local(provider):
            structlog.get_logger().warning("model_without_price", model=model, what_to_do=f"set models.{model}.price")
        return found


def pricing_of(config: Config, provider: str, model: str) -> Pricing | None:
    """The prices of a model: the config's own, else those of the price list; None where it has none."""
    settings, serving = config.models.get(model), config.providers.get(provider)
    own = None if settings is None else settings.price
    if isinstance(serving, LocalSettings):
        # Never from the list: a program's name may happen to be that of a model in it.
        return own if serving.cost_per_call_usd is None else _PerCall(serving.cost_per_call_usd, own)
    return own or _find(model, settings)


def token_rules(config: Config, provider: str, model: str) -> TokenRules:
    """How the tokens of a call are estimated: by its provider, and by what the model goes by there."""
    serving, settings = config.providers.get(provider), config.models.get(model)
    return rules_for(
        "" if serving is None else serving.kind,
        serving.base_url if isinstance(serving, HttpSettings) else "",
        (config.name_at_provider(provider, model), model),
        None if settings is None else settings.image_tokens,
    )


@dataclass(frozen=True, slots=True)
class _PerCall:
    """A program that is said to cost so much for each call, whatever it uses."""

    cost_per_call: int
    own: Price | None

    def cost(self, usage: Usage) -> int | None:
        return None if self.own is None else self.own.cost(usage)

    def worst_case(self, input_tokens: int, max_tokens: int) -> int:
        del input_tokens, max_tokens
        return self.cost_per_call


@dataclass(frozen=True, slots=True)
class _Listed:
    provider: Provider
    info: ModelInfo

    def cost(self, usage: Usage) -> int | None:
        from genai_prices import Usage as Counts

        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        # The list refuses parts that are more than the whole; some providers report such.
        cached = min(usage.cached_tokens or 0, usage.input_tokens)
        counts = Counts(
            input_tokens=usage.input_tokens,
            cache_read_tokens=cached,
            cache_write_tokens=min(usage.cache_write_tokens or 0, usage.input_tokens - cached),
            output_tokens=usage.output_tokens,
            output_reasoning_tokens=min(usage.reasoning_tokens or 0, usage.output_tokens),
        )
        found = self.info.calc_price(counts, self.provider)
        if found.model_price.input_mtok is None or found.model_price.output_mtok is None:
            return None  # sold by the hour or the page; the list would say that its tokens are free
        return int((found.total_price * NANO_PER_USD).quantize(Decimal(1), ROUND_HALF_UP))

    def worst_case(self, input_tokens: int, max_tokens: int) -> int | None:
        from genai_prices.types import calc_unit_price

        prices = self.info.get_prices(datetime.now(UTC))

        def is_dearer(part: Rate, whole: Rate) -> bool:
            return calc_unit_price(part, 1, input_tokens, 1) > calc_unit_price(whole, 1, input_tokens, 1)

        # A provider may put the whole input into its cache by itself, and may charge more for that.
        written = is_dearer(prices.cache_write_mtok, prices.input_mtok)
        cached = not written and is_dearer(prices.cache_read_mtok, prices.input_mtok)
        thought = is_dearer(prices.output_reasoning_mtok, prices.output_mtok)
        return self.cost(
            Usage(
                input_tokens,
                max_tokens,
                cached_tokens=input_tokens if cached else 0,
                cache_write_tokens=input_tokens if written else 0,
                reasoning_tokens=max_tokens if thought else 0,
            )
        )


def _find(model: str, settings: ModelSettings | None) -> Pricing | None:
    # A second to import, so only for a model that the config does not price.
    from genai_prices.data_snapshot import get_snapshot

    prices = get_snapshot()
    for name, provider_id in _names(model, settings):
        try:
            provider, info = prices.find_provider_model(name, None, provider_id, None)
        except LookupError:
            continue
        return _Listed(provider, info)
    return None


def _names(model: str, settings: ModelSettings | None) -> Iterator[tuple[str, str | None]]:
    """What the list may have a model under, and by which provider; the surest first."""
    prefix, _, name = model.partition("/")
    if settings is not None and settings.name is not None:
        yield settings.name, settings.provider or (prefix if name else None)
        yield settings.name, None
    yield model, None
    if name:
        yield name, prefix
        yield name, None
