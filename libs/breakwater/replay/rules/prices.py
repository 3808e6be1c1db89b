"""The costs of recorded calls at other prices."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.jobs.contract.execution import Attempt
from breakwater.prices.price_list import Pricing
from breakwater.prices.rules.usage import Usage

Prices = Mapping[tuple[str, str], Pricing]
"""The prices of models or deployments, by their unit and provider."""


class ChangedPrices:
    """The prices that differ between two configs, of what both have a price for."""

    def __init__(self, before: Prices, after: Prices) -> None:
        """Compares the prices that calls were recorded at with others."""
        self._changed = {
            place: (pricing, after[place])
            for place, pricing in before.items()
            if place in after and after[place] != pricing
        }

    def has(self, call: Attempt) -> bool:
        """Returns True if a call would be priced otherwise."""
        return bool(self._changed) and (call.unit, call.provider) in self._changed

    def reprice(self, call: Attempt) -> Attempt:
        """Returns a call with its cost and its reservation at the other prices: the same call if they do not differ.

        The record has the tokens of a call, but not all of their kinds: its cost changes by the share by which that of
        these tokens does, and its worst case as if all that is not known input were output.
        """
        changed = self._changed.get((call.unit, call.provider)) if self._changed else None
        if changed is None:
            return call
        usage = Usage(call.input_tokens, call.output_tokens, call.cached_tokens, reasoning_tokens=call.reasoning_tokens)
        costs = [None if (cost := pricing.cost(usage)) is None else cost.nano for pricing in changed]
        input_tokens = min(call.input_tokens or 0, call.reserved_tokens or 0)
        worst = [pricing.worst_case(input_tokens, (call.reserved_tokens or 0) - input_tokens) for pricing in changed]
        reserved = _in_proportion(call.reserved, *worst)
        is_worst_case = call.cost is not None and call.cost == call.reserved
        return call.model_copy(
            update={"cost": reserved if is_worst_case else _in_proportion(call.cost, *costs), "reserved": reserved}
        )


def _in_proportion(nano: int | None, before: int | None, after: int | None) -> int | None:
    if nano is None or not before or after is None:
        return nano
    return (2 * nano * after + before) // (2 * before)
