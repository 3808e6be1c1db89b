"""The model of a call: its provider, name, deployment and prices."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.prices.price_list import Pricing
from breakwater.prices.rules.price import TokenRules


@dataclass(frozen=True, slots=True)
class Target:
    """A model as an agent calls it."""

    model: str
    provider: str
    """The name of the provider; empty if it is unknown."""
    name: str
    """The provider's name for the model."""
    deployment: str
    """Provider and name: the unit of the provider's limits, of holds and of retry budgets."""
    token_rules: TokenRules
    """The rules that estimate the tokens of a call."""
    pricing: Pricing | None
    """None if the model has no price."""


@dataclass(frozen=True, slots=True)
class SubstituteModel:
    """A model that answered in place of the requested one.

    Attributes:
        known_name: its name in the config or in the price list; None where neither has it.
        pricing: None where it has no price.
    """

    known_name: str | None
    pricing: Pricing | None
