"""Prices and totals."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.jobs.rules.record import totals
from breakwater.limits.settings import Caps
from breakwater.prices.rules.price import Cost, max_output_of, max_tokens_of, tariff_of
from breakwater.prices.rules.usage import MAX_USAGE, Usage, credible
from breakwater.prices.settings import Price
from tests.records.test_messages import attempt
from tests.tables import each_row

TOKENS = st.integers(0, 10_000_000)
PRICES = st.integers(0, 10**12)


def price(input_nano: int, output_nano: int, cached_nano: int | None = None) -> Price:
    return Price.model_construct(
        input_usd_per_mtok=input_nano, output_usd_per_mtok=output_nano, cached_input_usd_per_mtok=cached_nano
    )


@given(TOKENS, TOKENS, TOKENS, PRICES, PRICES, PRICES)
def test_a_cost_is_exact_to_the_nano_dollar(
    input_tokens: int, output: int, cached: int, input_price: int, output_price: int, cached_price: int
) -> None:
    cached = min(cached, input_tokens)
    exact = (
        Decimal(input_tokens - cached) * input_price + Decimal(cached) * cached_price + Decimal(output) * output_price
    ) / 1_000_000
    got = tariff_of(price(input_price, output_price, cached_price)).cost(Usage(input_tokens, output, cached))
    assert got is not None
    assert got.nano == int(exact.quantize(Decimal(1), ROUND_HALF_UP))


def test_cached_tokens_cost_their_own_price_and_the_full_one_where_there_is_none() -> None:
    usage = Usage(1_000_000, 0, 400_000)
    assert tariff_of(price(2_000, 0, 500)).cost(usage) == Cost(600_000 * 2_000 // 10**6 + 400_000 * 500 // 10**6)
    assert tariff_of(price(2_000, 0)).cost(usage) == Cost(2_000)


@pytest.mark.parametrize("usage", [Usage(None, 5), Usage(5, None), Usage(None, None)])
def test_what_is_not_known_costs_none_and_not_zero(usage: Usage) -> None:
    assert tariff_of(price(1, 1)).cost(usage) is None


@given(TOKENS, TOKENS, PRICES, PRICES, PRICES)
def test_the_worst_case_has_all_of_the_input_at_the_dearer_of_its_prices(
    tokens: int, output: int, input_price: int, output_price: int, write_price: int
) -> None:
    written = price(input_price, output_price).model_copy(update={"cache_write_usd_per_mtok": write_price})
    dearer = price(max(input_price, write_price), output_price)
    most = tariff_of(dearer).cost(Usage(tokens, output))
    assert most is not None
    assert tariff_of(written).worst_case(tokens, output) == most.nano


def test_the_output_limit_is_the_requests_own_where_it_has_one() -> None:
    assert max_tokens_of({"max_tokens": 5}, 100) == 5
    assert max_tokens_of({"max_completion_tokens": 7, "max_tokens": 50}, 100) == 50
    assert max_tokens_of({"max_tokens": True}, 100) == 100
    assert max_tokens_of({"max_tokens": -1}, 100) == 100


@each_row(
    ("params", "most"),
    [
        ({}, 100),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 5000, "thinking": {"type": "enabled", "budget_tokens": 2000}}, 5000),
        ({"max_tokens": 1000, "thinking": {"type": "enabled", "budget_tokens": 2000}}, 2000),
        ({"reasoning": {"max_tokens": 300}}, 300),
        ({"reasoning": {"effort": "high"}, "thinking": None}, 100),
        ({"max_tokens": 50, "thinking_budget": 30, "n": 2}, 160),
        ({"max_tokens": 50, "thinking_budget": 10**18}, 50 + 10_000_000),
    ],
)
def test_the_most_that_a_call_may_answer_has_its_choices_and_its_thinking(params: dict[str, Any], most: int) -> None:
    assert max_output_of(params, 100) == most


@each_row("name", ["input", "output", "cached", "cache_write", "reasoning"])
def test_more_tokens_than_a_call_can_have_are_not_credible(name: str) -> None:
    usual = Usage(1, 2, 3, 4, 5)
    assert credible(Usage(None, None)) == Usage(None, None)
    assert credible(most := replace(usual, **{f"{name}_tokens": MAX_USAGE})) is most
    for tokens, shown in ((MAX_USAGE + 1, "1.00e+8"), (10**15, "1.00e+15"), (10**400, "1.00e+400")):
        told = credible(replace(usual, **{f"{name}_tokens": tokens}))
        assert told == Usage(None, None, problem=told.problem)
        assert told.problem is not None
        assert told.problem.startswith(f"{shown} {name.replace('_', ' ')} tokens were reported")


def test_an_amount_in_the_config_is_what_the_person_wrote() -> None:
    assert Caps.model_validate({"daily_usd": 0.1}).daily_usd == 100_000_000
    assert Caps.model_validate({"daily_usd": "5.00"}).daily_usd == 5_000_000_000
    for wrong in (True, None, -1, "lots", 1e12):
        with pytest.raises(ValidationError):
            Price.model_validate({"input_usd_per_mtok": wrong, "output_usd_per_mtok": 1})


def test_totals_tell_what_was_wasted_and_how_sure_they_are() -> None:
    success = attempt(cost=100, cost_basis="billed", input_tokens=5, output_tokens=3)
    failed = attempt(cost=40, cost_basis="estimated", outcome="error")
    refused = attempt(cost=0, cost_basis="billed", outcome="short_circuited", short_circuited=True)
    unknown = attempt(cost=None, cost_basis="unknown", outcome="error")
    sums = totals([failed, refused, success], answered=True)
    assert (sums.total_cost, sums.wasted_cost, sums.cost_basis) == (140, 40, "estimated")
    assert (sums.input_tokens, sums.output_tokens) == (5, 3)
    sums = totals([unknown, success], answered=True)
    assert (sums.total_cost, sums.wasted_cost, sums.cost_basis) == (100, None, "unknown")
    sums = totals([refused], answered=False)
    assert (sums.total_cost, sums.cost_basis) == (0, "none")
    assert totals([unknown], answered=False).total_cost is None


def test_a_success_whose_answer_was_lost_is_wasted() -> None:
    lost, used = attempt(cost=30, cost_basis="billed"), attempt(cost=100, cost_basis="billed")
    assert totals([lost, used], answered=True).wasted_cost == 30
    assert totals([lost], answered=False).wasted_cost == 30
