"""What each model costs: from the config, else from the price list that comes with `genai-prices`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import structlog

from breakwater.config import ModelSettings
from breakwater.contracts.types import NANO_PER_USD
from breakwater.policy.price import Price, Usage, cost_nano, estimate_input_tokens

Pricing = Callable[[Usage], int | None]


class PriceBook:
    """Looks a model's price up once, and then only calculates."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._models = models
        self._known: dict[str, Pricing | None] = {}

    def cost(self, model: str, usage: Usage) -> int | None:
        """The cost of a call in nano-dollars; None where the model has no price or the usage was not reported."""
        pricing = self._pricing(model)
        if pricing is None or usage.input_tokens is None or usage.output_tokens is None:
            return None
        return pricing(usage)

    def worst_case(self, model: str, body_bytes: int, max_tokens: int) -> int | None:
        """The most a call can cost in nano-dollars; None where the model has no price."""
        return self.cost(model, Usage(estimate_input_tokens(body_bytes), max_tokens))

    def _pricing(self, model: str) -> Pricing | None:
        if model not in self._known:
            settings = self._models.get(model)
            own = settings.price if settings is not None else None
            self._known[model] = _listed(model) if own is None else _from_config(own)
        return self._known[model]


def _from_config(price: Price) -> Pricing:
    return lambda usage: cost_nano(usage, price)


def _listed(model: str) -> Pricing | None:
    # A second to import, so only for a model that the config does not price.
    import genai_prices
    from genai_prices.data_snapshot import get_snapshot

    try:
        provider, _ = get_snapshot().find_provider_model(model, None, None, None)
    except LookupError:
        structlog.get_logger().warning("model_without_price", model=model, what_to_do=f"set models.{model}.price")
        return None

    def pricing(usage: Usage) -> int | None:
        counts: dict[str, Any] = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        if usage.cached_tokens is not None:
            counts["cache_read_tokens"] = usage.cached_tokens
        total = genai_prices.calc_price(genai_prices.Usage(**counts), model, provider_id=provider.id).total_price
        return int((total * NANO_PER_USD).quantize(Decimal(1), ROUND_HALF_UP))

    return pricing
