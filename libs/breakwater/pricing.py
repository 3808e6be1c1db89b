"""What each model costs: by the config's own price, else by the price list that comes with `genai-prices`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Protocol

from breakwater.config import Config, ModelSettings
from breakwater.contracts.types import NANO_PER_USD
from breakwater.policy.alert_texts import money_text
from breakwater.policy.price import Price, Usage, max_output_of
from breakwater.providers.base import LocalSettings

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


def pricing_of(config: Config, provider: str, model: str) -> Pricing | None:
    """The prices of a model: the config's own, else those of the price list; None where it has none."""
    settings, serving = config.models.get(model), config.providers.get(provider)
    own = None if settings is None else settings.price
    if isinstance(serving, LocalSettings):
        # Never from the list: a program's name may happen to be that of a model in it.
        return own if serving.cost_per_call_usd is None else _PerCall(serving.cost_per_call_usd, own)
    return own or _find(model, settings)


def unaffordable(config: Config, agent_name: str) -> str | None:
    """Why no call of an agent is ever made, whatever was spent: a hard cap has no room for the least of its calls.

    Only its own caps and the global ones count, not those of tenants. None where one of its models may be called.
    """
    agent = config.agents[agent_name]
    hard = [one.hard_limit for one in config.caps.counters(agent_name, None)]
    caps = [limit for limit in (*hard, agent.max_cost_usd) if limit is not None]
    if not caps:
        return None
    why: list[str] = []
    for model in agent.chain:
        pricing = pricing_of(config, config.provider_name(agent, model) or "", model)
        least = None if pricing is None else pricing.worst_case(0, max_output_of(agent.params, agent.max_tokens))
        if least is None:
            why.append(f"{model} has no price (set models.{model}.price)")
        elif least > min(caps):
            cap = money_text(min(caps))
            why.append(f"the output of a call to {model} alone may cost {money_text(least)}, and the cap is {cap}")
        else:
            return None
    return f"no call is ever made under the hard cap: {'; '.join(why)}"


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
