"""Prices of models: from the config, or else from the price list of `genai-prices`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Protocol

from breakwater.calls.providers.base import LocalSettings
from breakwater.config import Config, ModelSettings
from breakwater.kernel.formats import moneys
from breakwater.kernel.types import NANO_PER_USD
from breakwater.prices.rules.price import Cost, InputSize, Rates, Tariff, max_output_of, tariff_of
from breakwater.prices.rules.usage import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices


class Pricing(Protocol):
    """The prices of one model."""

    def cost(self, usage: Usage) -> Cost | None:
        """Prices a call; None if its usage was not reported."""
        ...

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int | None:
        """Returns the most nano-dollars that a call can cost; None if the model has no price for it.

        Args:
            input_tokens: a high estimate of the input.
            max_tokens: the most output that the call may have.
            size: the size of the request, by what it consists of.
        """
        ...


def pricing_of(config: Config, provider: str, model: str) -> Pricing | None:
    """Returns the prices of a model: the config's, else those of the price list; None if neither has the model."""
    settings = config.models.get(model)
    provider_settings = config.providers.get(provider)
    tools = {} if settings is None else settings.tool_prices
    configured = None if settings is None or settings.price is None else replace(tariff_of(settings.price), tools=tools)
    if isinstance(provider_settings, LocalSettings):
        # Never from the list: a program may happen to have the name of a model in it.
        cost_per_call = provider_settings.cost_per_call_usd
        return configured if cost_per_call is None else _PerCall(cost_per_call, configured)
    if configured is not None:
        return configured
    listed = _find(model, settings)
    return None if listed is None else replace(listed, tools=tools)


def sells_embeddings(pricing: Pricing | None) -> bool:
    """Returns True for a model whose input has a price and whose output has none."""
    if pricing is None:
        return False
    prices_input = pricing.worst_case(0, 0) is not None
    prices_output = pricing.worst_case(0, 1) is not None
    return prices_input and not prices_output


def listed_name(pricing: Pricing) -> str | None:
    """Returns the model's id in the price list; None if its price is the config's."""
    return pricing.info.id if isinstance(pricing, _Listed) else None


def unaffordable(config: Config, agent_name: str) -> str | None:
    """Explains why an agent can never call: a hard cap is below the cost of its smallest call.

    Only its own caps and the global ones count, not those of tenants. None if any of its models may be called.
    """
    agent = config.agents[agent_name]
    caps = [
        (counter.hard_limit, counter.setting)
        for counter in config.caps.counters(agent_name, None)
        if counter.hard_limit is not None
    ]
    if agent.max_cost_usd is not None:
        caps.append((agent.max_cost_usd, f"agents.{agent_name}.max_cost_usd"))
    if not caps:
        return None
    cap, setting = min(caps)
    reasons: list[str] = []
    for model in agent.chain:
        pricing = pricing_of(config, config.provider_name(agent, model) or "", model)
        max_output = 0 if sells_embeddings(pricing) else max_output_of(agent.params, agent.max_tokens)
        output_cost = None if pricing is None else pricing.worst_case(0, max_output)
        if output_cost is None:
            reasons.append(f"{model} has no price (set models.{model}.price)")
        elif output_cost > cap:
            cost_text, cap_text = moneys(output_cost, cap)
            reasons.append(
                f"the output of a call to {model} alone may cost {cost_text}, and {setting} is {cap_text} "
                "(raise it, or lower max_tokens)"
            )
        else:
            return None
    return f"no call is ever made under the hard cap: {'; '.join(reasons)}"


def long_inputs_cost_more(model: str, settings: ModelSettings) -> int | None:
    """Returns the input tokens above which the price list has other prices, though the config's price has no tiers."""
    listed = None if settings.price is None or settings.price.tiers else _find(model, settings)
    steps = () if listed is None else listed.tariff(datetime.now(UTC)).standard.steps.get("input", ())
    return next((above for above, _ in steps if above > 0), None)


@dataclass(frozen=True, slots=True)
class _PerCall:
    """A fixed price per call, for programs."""

    cost_per_call: int
    tariff: Tariff | None

    def cost(self, usage: Usage) -> Cost | None:
        return None if self.tariff is None else self.tariff.cost(usage)

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int:
        del input_tokens, max_tokens, size
        return self.cost_per_call


_KEYS = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cached": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "cache_write_1h": "cache_write_1h_mtok",
    "input_audio": "input_audio_mtok",
    "input_image": "input_image_mtok",
    "input_video": "input_video_mtok",
    "reasoning": "output_reasoning_mtok",
    "citation": "output_citation_mtok",
    "output_audio": "output_audio_mtok",
    "output_image": "output_image_mtok",
    "output_video": "output_video_mtok",
}
_LONGEST_CALL = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class _Listed:
    info: ModelInfo
    tools: Mapping[str, int] = field(default_factory=dict[str, int])
    _rates: dict[int, Rates] = field(default_factory=dict[int, Rates], compare=False, repr=False)
    """Cached standard rates, by the identity of the list's prices; a model may have several, for different hours."""

    def cost(self, usage: Usage) -> Cost | None:
        tariff = self.tariff(datetime.now(UTC), usage.terms)
        return tariff.cost(usage) if _sells_tokens(tariff, usage.output_tokens) else None

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int | None:
        now = datetime.now(UTC)
        # Some models cost more at some hours, and a call may end in another hour than it began in.
        moments = (now, now + _LONGEST_CALL) if isinstance(self.info.prices, list) else (now,)
        tariffs = [self.tariff(moment) for moment in moments]
        if not all(_sells_tokens(tariff, max_tokens) for tariff in tariffs):
            return None
        return max(tariff.worst_case(input_tokens, max_tokens, size) or 0 for tariff in tariffs)

    def tariff(self, at: datetime, terms: Sequence[str] = ()) -> Tariff:
        """Returns the prices at a moment, with those on the terms that the list knows."""
        priced_terms = {
            term: _rates(self.info.get_prices(at, variant.when))
            for term in terms
            for variant in self.info.price_variants or ()
            if tuple(variant.when.values()) == (term,)
        }
        standard = self.info.get_prices(at)
        rates = self._rates.get(id(standard))
        if rates is None:
            rates = self._rates[id(standard)] = _rates(standard)
        return Tariff(rates, priced_terms, self.tools)


def _sells_tokens(tariff: Tariff, output_tokens: int | None) -> bool:
    """Returns False for models that are sold by the hour or the page, whose tokens would be free by the list.

    Embeddings have no output, so their models need no price for it.
    """
    return tariff.standard.steps.keys() >= ({"input"} if output_tokens == 0 else {"input", "output"})


def _rates(prices: ModelPrice) -> Rates:
    steps = {kind: _steps(rate) for kind, key in _KEYS.items() if (rate := getattr(prices, key)) is not None}
    return Rates(steps, _steps(prices.requests_kcount or Decimal(0))[0][1] // 1000)


def _steps(rate: Decimal | TieredPrices) -> list[tuple[int, int]]:
    if isinstance(rate, Decimal):
        return [(-1, _nano(rate))]
    return [(-1, _nano(rate.base)), *((tier.start, _nano(tier.price)) for tier in rate.tiers)]


def _nano(usd: Decimal) -> int:
    return int((usd * NANO_PER_USD).quantize(Decimal(1), ROUND_HALF_UP))


def _find(model: str, settings: ModelSettings | None) -> _Listed | None:
    # The import takes a second, so it is made only for a model that the config does not price.
    from genai_prices.data_snapshot import get_snapshot

    prices = get_snapshot()
    for name, provider_id in _names(model, settings):
        try:
            _, info = prices.find_provider_model(name, None, provider_id, None)
        except LookupError:
            continue
        return _Listed(info)
    return None


def _names(model: str, settings: ModelSettings | None) -> Iterator[tuple[str, str | None]]:
    """Candidate names of a model in the price list, with their providers, best match first."""
    prefix, _, name = model.partition("/")
    if settings is not None and settings.name is not None:
        yield settings.name, settings.provider or (prefix if name else None)
        yield settings.name, None
    yield model, None
    if name:
        yield name, prefix
        yield name, None
