"""The deployment of a call: a model at its provider, with its name, its key and its prices."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.jobs.contract.job import CallApi
from breakwater.prices.price_list import Pricing
from breakwater.prices.rules.price import TokenRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment of a model, as an agent calls it."""

    model: str
    provider: str
    """The name of the provider; empty if it is unknown."""
    name: str
    """The provider's name for the model."""
    deployment: str
    """Its id, provider, name and key: the unit of the provider's limits, of holds and of retry budgets."""
    listed: str | None = None
    """The same id if the model lists its deployments, as attempts record it; else None."""
    key: str | None = None
    """The name of its key; None for the provider's own."""
    connection: str
    """The name of the open provider that calls it."""
    has_others: bool = False
    """True if the model has other deployments, among which its calls choose."""
    weight: float = 1.0
    overflow: bool = False
    """True if it is called only while no other deployment may be."""
    region: str | None = None
    apis: frozenset[CallApi] = frozenset()
    """The APIs whose requests its provider takes."""
    unchanged_apis: frozenset[CallApi] = frozenset()
    """Those whose requests it gets as they are, not translated into its own format."""
    token_rules: TokenRules
    """The rules that estimate the tokens of a call."""
    pricing: Pricing | None
    """None if the model has no price."""

    @property
    def unit(self) -> str:
        """The unit that its breaker is of: the deployment if the model lists some, else the model."""
        return self.listed or self.model


@dataclass(frozen=True, slots=True)
class SubstituteModel:
    """A model that answered in place of the requested one.

    Attributes:
        known_name: its name in the config or in the price list; None where neither has it.
        pricing: None where it has no price.
    """

    known_name: str | None
    pricing: Pricing | None


def is_within(region: str | None, residency: str | None) -> bool:
    """Returns True if calls that must not leave a region may go to another: `eu-west-1` is within `eu`."""
    return residency is None or (region is not None and f"{region}-".startswith(f"{residency}-"))
