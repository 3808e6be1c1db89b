"""Prices of models in the config."""

from __future__ import annotations

from pydantic import Field

from breakwater.kernel.types import Message, UsdAmount

MAX_OUTPUT_TOKENS = 10_000_000
"""The highest output limit that an agent or a request may have."""


class TokenPrices(Message):
    """Prices in USD per million tokens. Kinds of tokens without a price of their own are estimated."""

    input_usd_per_mtok: UsdAmount
    output_usd_per_mtok: UsdAmount
    cached_input_usd_per_mtok: UsdAmount | None = Field(default=None, description="By default the input price.")
    cache_write_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default 1.25 times the input price, as an estimate."
    )
    cache_write_1h_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="Of what is kept for an hour. By default twice the input price, as an estimate."
    )
    audio_input_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default 16 times the input price, as an estimate."
    )
    audio_output_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default ten times the output price, as an estimate."
    )


class TierPrices(TokenPrices):
    """Prices of calls with a long input. They apply to all tokens of such a call, not only to those above the limit."""

    above_tokens: int = Field(ge=1, description="Calls with more tokens of input have these prices.")


class Price(TokenPrices):
    """Prices of a model."""

    tiers: tuple[TierPrices, ...] = Field(default=(), description="Prices of calls with a long input.")
    service_tiers: dict[str, TokenPrices] = Field(
        default_factory=dict,
        description="Prices where the answer says that it was served on other terms: `priority`. Jobs may ask for "
        "these terms.",
    )
