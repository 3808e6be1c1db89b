"""Prices, budgets and totals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.policy.budget import Caps, counters, current_and_next, period, reached
from breakwater.policy.price import Price, Usage, cost_nano, estimate_input_tokens, max_tokens_of, worst_case_nano
from breakwater.policy.record import totals
from tests.contracts.test_messages import attempt

TOKENS = st.integers(0, 10_000_000)
PRICES = st.integers(0, 10**12)
BERLIN = ZoneInfo("Europe/Berlin")
USD = 10**9


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
    got = cost_nano(Usage(input_tokens, output, cached), price(input_price, output_price, cached_price))
    assert got == int(exact.quantize(Decimal(1), ROUND_HALF_UP))


def test_cached_tokens_cost_their_own_price_and_the_full_one_where_there_is_none() -> None:
    usage = Usage(1_000_000, 0, 400_000)
    assert cost_nano(usage, price(2_000, 0, 500)) == 600_000 * 2_000 // 10**6 + 400_000 * 500 // 10**6
    assert cost_nano(usage, price(2_000, 0)) == 2_000


@pytest.mark.parametrize("usage", [Usage(None, 5), Usage(5, None), Usage(None, None)])
def test_what_is_not_known_costs_none_and_not_zero(usage: Usage) -> None:
    assert cost_nano(usage, price(1, 1)) is None
    assert cost_nano(Usage(5, 5), None) is None


@given(st.text(max_size=300), st.integers(1, 10_000))
def test_the_worst_case_is_never_below_what_the_text_can_cost(text: str, max_tokens: int) -> None:
    # Byte-level tokenizers make no more tokens than bytes; ordinary text takes three bytes and more for one.
    body = len(text.encode())
    worst = worst_case_nano(body, max_tokens, price(10**9, 10**9))
    assert worst == cost_nano(Usage(estimate_input_tokens(body), max_tokens), price(10**9, 10**9))
    assert estimate_input_tokens(body) >= body / 3


def test_the_output_limit_is_the_requests_own_where_it_has_one() -> None:
    assert max_tokens_of({"max_tokens": 5}, 100) == 5
    assert max_tokens_of({"max_completion_tokens": 7, "max_tokens": 50}, 100) == 50
    assert max_tokens_of({"max_tokens": True}, 100) == 100
    assert max_tokens_of({"max_tokens": -1}, 100) == 100


def test_an_amount_in_the_config_is_what_the_person_wrote() -> None:
    assert Caps.model_validate({"daily_usd": 0.1}).daily_usd == 100_000_000
    assert Caps.model_validate({"daily_usd": "5.00"}).daily_usd == 5_000_000_000
    for wrong in (True, None, -1, "lots", 1e12):
        with pytest.raises(ValidationError):
            Price.model_validate({"input_usd_per_mtok": wrong, "output_usd_per_mtok": 1})


def test_a_call_is_held_against_four_budgets() -> None:
    found = counters(
        "a", Caps.model_validate({"daily_usd": 5, "enforcement": "hard"}), Caps.model_validate({"monthly_usd": 9})
    )
    assert [(c.key, c.window, c.limit, c.hard_limit) for c in found] == [
        ("global", "daily", None, None),
        ("global", "monthly", 9 * USD, None),
        ("agent:a", "daily", 5 * USD, 5 * USD),
        ("agent:a", "monthly", None, None),
    ]


@pytest.mark.parametrize(
    ("moment", "name", "end", "hours"),
    [
        # The clocks of Berlin go forward on 29 March 2026 and back on 25 October 2026.
        (datetime(2026, 3, 29, 5, tzinfo=UTC), "2026-03-29", datetime(2026, 3, 29, 22, tzinfo=UTC), 23),
        (datetime(2026, 10, 25, 5, tzinfo=UTC), "2026-10-25", datetime(2026, 10, 25, 23, tzinfo=UTC), 25),
        (datetime(2026, 11, 21, 22, 59, 59, tzinfo=UTC), "2026-11-21", datetime(2026, 11, 21, 23, tzinfo=UTC), 24),
        (datetime(2026, 11, 21, 23, 0, tzinfo=UTC), "2026-11-22", datetime(2026, 11, 22, 23, tzinfo=UTC), 24),
    ],
)
def test_a_day_ends_at_midnight_where_the_budget_lives(moment: datetime, name: str, end: datetime, hours: int) -> None:
    found = period("daily", moment, BERLIN)
    assert found.name == name
    assert found.end_ms == int(end.timestamp() * 1000)
    before = period("daily", end - timedelta(hours=hours, seconds=1), BERLIN)
    assert before.end_ms == found.end_ms - hours * 3_600_000


def test_a_month_ends_with_its_last_day() -> None:
    found = period("monthly", datetime(2026, 2, 28, 22, 59, tzinfo=UTC), BERLIN)
    assert (found.name, found.end_ms) == ("2026-02", int(datetime(2026, 2, 28, 23, tzinfo=UTC).timestamp() * 1000))
    assert period("monthly", datetime(2026, 12, 31, 23, 30, tzinfo=UTC), BERLIN).name == "2027-01"


@given(st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1)), st.sampled_from(["daily", "monthly"]))
def test_periods_follow_each_other_without_gap(moment: datetime, window: str) -> None:
    now = moment.replace(tzinfo=UTC)
    current, following = current_and_next(window, now, BERLIN)  # type: ignore[arg-type]
    assert now.timestamp() * 1000 < current.end_ms < following.end_ms
    last_moment = datetime.fromtimestamp((current.end_ms - 1) / 1000, UTC)
    assert period(window, last_moment, BERLIN) == current  # type: ignore[arg-type]


def test_thresholds_are_reached_to_the_nano_dollar() -> None:
    counter = counters("a", Caps.model_validate({"daily_usd": "0.000001", "soft_at_percent": (50, 80)}), Caps())[2]
    assert reached(counter, 499) == ()
    assert reached(counter, 500) == (50,)
    assert reached(counter, 999) == (50, 80)
    assert reached(counter, 1_000) == (50, 80, 100)


def test_a_cap_that_refuses_is_reached_though_the_spend_is_below_it() -> None:
    counter = counters("a", Caps.model_validate({"daily_usd": "0.000001", "soft_at_percent": (50, 80)}), Caps())[2]
    assert reached(counter, 10, refused=True) == (100,)
    assert reached(counter, 850, refused=True) == (50, 80, 100)
    assert reached(counter, 1_000, refused=True) == (50, 80, 100)


@pytest.mark.parametrize("caps", [{"enforcement": "none", "daily_usd": 1}, {}, {"daily_usd": 0}])
def test_a_budget_without_a_cap_or_that_only_tracks_reaches_nothing(caps: dict[str, object]) -> None:
    assert reached(counters("a", Caps.model_validate(caps), Caps())[2], 10**9) == ()


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
    assert totals([refused], answered=False).total_cost == 0
    assert totals([unknown], answered=False).total_cost is None


def test_a_success_whose_answer_was_lost_is_wasted() -> None:
    lost, used = attempt(cost=30, cost_basis="billed"), attempt(cost=100, cost_basis="billed")
    assert totals([lost, used], answered=True).wasted_cost == 30
    assert totals([lost], answered=False).wasted_cost == 30
