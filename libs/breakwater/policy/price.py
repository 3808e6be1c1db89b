"""What a call costs, in integer nano-dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, JsonValue

from breakwater.contracts.types import Message, UsdAmount

TOKENS_PER_PRICE = 1_000_000


class Price(Message):
    """Prices of a model in USD per million tokens."""

    input_usd_per_mtok: UsdAmount
    output_usd_per_mtok: UsdAmount
    cached_input_usd_per_mtok: UsdAmount | None = Field(default=None, description="The input price where absent.")
    cache_write_usd_per_mtok: UsdAmount | None = Field(default=None, description="The input price where absent.")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call as the provider reports them. None where it was not reported.

    Attributes:
        input_tokens: all of them, those read from a cache or written to one included.
        output_tokens: all of them, reasoning included.
        cached_tokens: of the input, read from a cache.
        cache_write_tokens: of the input, written to a cache.
        reasoning_tokens: of the output.
    """

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


def cost_nano(usage: Usage, price: Price | None) -> int | None:
    """What a call costs, rounded half up once to whole nano-dollars. None where price or usage is unknown."""
    if price is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    cached = min(usage.cached_tokens or 0, usage.input_tokens)
    written = min(usage.cache_write_tokens or 0, usage.input_tokens - cached)
    plain = price.input_usd_per_mtok
    exact = (
        (usage.input_tokens - cached - written) * plain
        + cached * _or(price.cached_input_usd_per_mtok, plain)
        + written * _or(price.cache_write_usd_per_mtok, plain)
        + usage.output_tokens * price.output_usd_per_mtok
    )
    return (2 * exact + TOKENS_PER_PRICE) // (2 * TOKENS_PER_PRICE)


def _or(price: int | None, default: int) -> int:
    return default if price is None else price


def worst_case_nano(input_tokens: int, max_tokens: int, price: Price | None) -> int | None:
    """The most a call can cost. None where the model has no price.

    Args:
        input_tokens: a high estimate, of `policy.estimate`.
        max_tokens: all the output that it may have.
        price: of the model.
    """
    # A provider may write the whole input into its cache by itself, and charge more for that.
    dearer = price is not None and (price.cache_write_usd_per_mtok or 0) > price.input_usd_per_mtok
    return cost_nano(Usage(input_tokens, max_tokens, cache_write_tokens=input_tokens if dearer else None), price)


def choices_of(params: Mapping[str, JsonValue]) -> int:
    """How many answers a request asks for: `n`."""
    return _positive(params.get("n")) or 1


def max_tokens_of(params: Mapping[str, JsonValue], default: int) -> int:
    """The output limit of a request: the higher one where it has two, else the default."""
    given = [value for name in OUTPUT_LIMITS if (value := _positive(params.get(name))) is not None]
    return max(given, default=default)


def max_output_of(params: Mapping[str, JsonValue], default: int) -> int:
    """The most tokens that a call may give: all of its choices, and what it may think.

    Thinking is within the limit of the output wherever that is documented. Two budgets of it are not: Anthropic's may
    be more than the limit where a model thinks between tool calls, and Alibaba's comes on top of it.
    """
    within = max(max_tokens_of(params, default), *(_budget(_part(params.get(name), key)) for name, key in _THINKING))
    return (within + _budget(params.get("thinking_budget"))) * choices_of(params)


_THINKING = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens")
MAX_OUTPUT_TOKENS = 10_000_000


def _positive(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _budget(value: JsonValue) -> int:
    return min(_positive(value) or 0, MAX_OUTPUT_TOKENS)


def _part(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None
