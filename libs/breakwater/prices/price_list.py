"""Prices of models: those of the price list of `genai-prices`, and fixed prices per call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Protocol

from breakwater.kernel.types import NANO_PER_USD
from breakwater.prices.rules.price import Cost, InputSize, Rates, Tariff
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


def sells_embeddings(pricing: Pricing | None) -> bool:
    """Returns True for a model whose input has a price and whose output has none."""
    if pricing is None:
        return False
    prices_input = pricing.worst_case(0, 0) is not None
    prices_output = pricing.worst_case(0, 1) is not None
    return prices_input and not prices_output


def discounts_cached(pricing: Pricing) -> bool:
    """Returns True if input that a provider reads from its prompt cache costs less than other input."""
    costs = [pricing.cost(Usage(_MANY, 0, cached)) for cached in (0, _MANY)]
    return all(cost is not None for cost in costs) and costs[1].nano < costs[0].nano  # pyright: ignore


_MANY = 10_000


def listed_name(pricing: Pricing) -> str | None:
    """Returns the model's id in the price list; None if its price is the config's."""
    return pricing.info.id if isinstance(pricing, ListedPricing) else None


@dataclass(frozen=True, slots=True)
class CallPrice:
    """A fixed price per call, for programs."""

    cost_per_call: int
    tariff: Tariff | None

    def cost(self, usage: Usage) -> Cost | None:
        """Prices a call by its tokens, if the config has prices for them."""
        return None if self.tariff is None else self.tariff.cost(usage)

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int:
        """Returns the fixed price."""
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
class ListedPricing:
    """The prices of a model by the list."""

    info: ModelInfo
    tools: Mapping[str, int] = field(default_factory=dict[str, int])
    _rates: dict[int, Rates] = field(default_factory=dict[int, Rates], compare=False, repr=False)
    """Cached standard rates, by the identity of the list's prices; a model may have several, for different hours."""

    def cost(self, usage: Usage) -> Cost | None:
        """Prices a call at the current prices; None if the list does not price its tokens."""
        tariff = self.tariff(datetime.now(UTC), usage.terms)
        return tariff.cost(usage) if _sells_tokens(tariff, usage.output_tokens) else None

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int | None:
        """Returns the most that a call can cost while it lasts; None if the list does not price its tokens."""
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


def listed_pricing(
    model: str, name: str | None = None, provider: str | None = None, *, seller: str | None = None
) -> ListedPricing | None:
    """Returns a model's prices by the list; None if it does not have the model.

    Args:
        model: the model's id.
        name: its name at the provider, if that is known to differ.
        provider: the provider that the name is of, if it is known.
        seller: the provider in the list, if it is known.
    """
    # The import takes a second, so it is made only for a model that the config does not price.
    from genai_prices.data_snapshot import get_snapshot

    prices = get_snapshot()
    for candidate, provider_id in _candidates(model, name, provider, seller):
        try:
            _, info = prices.find_provider_model(candidate, None, provider_id, None)
        except LookupError:
            continue
        return ListedPricing(info)
    return None


def _candidates(
    model: str, name: str | None, provider: str | None, seller: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yields the names that the list may have a model under, with their providers, the best match first."""
    prefix, _, name_in_id = model.partition("/")
    if seller is not None:
        yield from ((candidate, seller) for candidate in (name, name_in_id, model) if candidate)
    if name is not None:
        yield name, provider or (prefix if name_in_id else None)
        yield name, None
    yield model, None
    if name_in_id:
        yield name_in_id, prefix
        yield name_in_id, None
