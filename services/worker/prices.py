"""What each model costs: from the config, else from the price list that comes with `genai-prices`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Protocol

import structlog

from breakwater.config import Agent, Config, ModelSettings
from breakwater.contracts.types import NANO_PER_USD
from breakwater.policy.price import (
    InputSize,
    Price,
    TokenRules,
    Usage,
    cost_nano,
    estimate_input_tokens,
    rules_for,
    worst_case_nano,
)
from breakwater.providers.base import HttpSettings, LocalSettings

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider, TieredPrices

    Rate = Decimal | TieredPrices | None


class Pricing(Protocol):
    """The prices of one model."""

    def cost(self, usage: Usage) -> int | None:
        """What a call costs in nano-dollars; None where its usage was not reported."""
        ...

    def worst_case(self, input_tokens: int, max_tokens: int) -> int | None:
        """The most that a call can cost in nano-dollars, by a high estimate of its input."""
        ...


class Prices:
    """What calls cost, by the config: a model's price, looked up once, or what a call of a program is said to cost."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[tuple[str, str], Pricing | None] = {}

    def input_tokens(self, agent: Agent, model: str, size: InputSize) -> int:
        """A high estimate of what a call's input will be counted as."""
        return estimate_input_tokens(size, token_rules(self._config, agent, model))

    def worst_case(self, provider: str, model: str, input_tokens: int, max_tokens: int) -> int | None:
        """The most that a call can cost in nano-dollars; None where that is not known.

        Args:
            provider: the one that performs it.
            model: the one to call.
            input_tokens: from `input_tokens`.
            max_tokens: the most it may answer, over all its choices.
        """
        settings = self._config.providers.get(provider)
        if isinstance(settings, LocalSettings) and settings.cost_per_call_usd is not None:
            return settings.cost_per_call_usd
        pricing = self._pricing(provider, model)
        return None if pricing is None else pricing.worst_case(input_tokens, max_tokens)

    def cost(self, provider: str, model: str, usage: Usage) -> int | None:
        """The cost of a call in nano-dollars; None where the model has no price or the usage was not reported."""
        pricing = self._pricing(provider, model)
        return None if pricing is None else pricing.cost(usage)

    def _pricing(self, provider: str, model: str) -> Pricing | None:
        if (provider, model) not in self._known:
            settings = self._config.models.get(model)
            own = settings.price if settings is not None else None
            if own is not None:
                self._known[provider, model] = _Configured(own)
            else:
                # A program's name may happen to be that of a model in the price list.
                local = self._config.is_local(provider)
                self._known[provider, model] = None if local else _find(model, settings)
        return self._known[provider, model]


@dataclass(frozen=True, slots=True)
class _Configured:
    price: Price

    def cost(self, usage: Usage) -> int | None:
        return cost_nano(usage, self.price)

    def worst_case(self, input_tokens: int, max_tokens: int) -> int | None:
        return worst_case_nano(input_tokens, max_tokens, self.price)


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


def token_rules(config: Config, agent: Agent, model: str) -> TokenRules:
    """How the tokens of a call are estimated: by its provider, and by what the model goes by there."""
    name = config.provider_name(agent, model) or ""
    provider, settings = config.providers.get(name), config.models.get(model)
    return rules_for(
        "" if provider is None else provider.kind,
        provider.base_url if isinstance(provider, HttpSettings) else "",
        (config.name_at_provider(name, model), model),
        None if settings is None else settings.image_tokens,
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
    structlog.get_logger().warning("model_without_price", model=model, what_to_do=f"set models.{model}.price")
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
