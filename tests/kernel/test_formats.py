"""Amounts and shares as people read them."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.formats import at_least, beyond, exact_money, money, moneys, percent, typed_money
from breakwater.kernel.types import usd_from_nano
from tests.tables import each_row

NANO = st.integers(-(10**18), 10**18)


@each_row(
    ("usd", "rounded", "exact"),
    [
        (None, "unknown", "unknown"),
        ("0", "$0.00", "$0.00"),
        ("0.000000001", "$0.000000001", "$0.000000001"),
        ("0.000040800", "$0.0000408", "$0.0000408"),
        ("0.004752", "$0.00475", "$0.004752"),
        ("0.0131", "$0.0131", "$0.0131"),
        ("0.05", "$0.05", "$0.05"),
        ("0.0390123", "$0.0390", "$0.0390123"),
        ("0.99951", "$1.00", "$0.99951"),
        ("0.123456789", "$0.123", "$0.123456789"),
        ("0.0012350", "$0.00124", "$0.001235"),
        ("0.0012450", "$0.00124", "$0.001245"),
        ("0.9996", "$1.00", "$0.9996"),
        ("1.005", "$1.00", "$1.005"),
        ("1.015", "$1.02", "$1.015"),
        ("1204.204999", "$1,204.20", "$1,204.204999"),
        ("-4.256", "-$4.26", "-$4.256"),
        ("-0.00012345", "-$0.000123", "-$0.00012345"),
    ],
)
def test_an_amount_is_rounded_by_one_rule_and_exact_by_another(usd: str | None, rounded: str, exact: str) -> None:
    nano = None if usd is None else int(Decimal(usd).scaleb(9))
    assert (money(nano), exact_money(nano)) == (money(usd), exact_money(usd)) == (rounded, exact)


@given(NANO)
def test_no_amount_loses_more_than_its_third_digit(nano: int) -> None:
    shown = Decimal(money(nano).replace("$", "").replace(",", "")).scaleb(9)
    assert abs(shown - nano) * 200 <= abs(nano)
    assert Decimal(typed_money(nano)) == Decimal(usd_from_nano(nano))


@given(NANO, NANO)
def test_compared_amounts_look_as_different_as_they_are(one: int, other: int) -> None:
    assert (len({*moneys(one, other)}) == 1) == (one == other)


def test_amounts_that_would_look_equal_are_exact() -> None:
    assert moneys(4_752_000, 4_752_001) == ("$0.004752", "$0.004752001")
    assert moneys(4_752_000, 4_800_000) == ("$0.00475", "$0.0048")
    assert moneys(4_799_999, 4_800_000) == ("$0.004799999", "$0.0048")


def test_an_amount_that_does_not_fit_never_looks_as_if_it_did() -> None:
    assert beyond(9_800_000_000, 400_000_000, 10**10) == ("$9.80", "$0.40", "$10.00")
    assert beyond(1_004_000_000, 499_000_000, 1_500_000_000) == ("$1.004", "$0.499", "$1.50")


def test_a_sum_that_lacks_a_part_is_a_lower_bound() -> None:
    assert [at_least(1_234_567_891, 0), at_least(1_234_567_891, 2), at_least(None, 2)] == ["$1.23", "$1.23+", "unknown"]


@each_row(
    ("share", "text"),
    [
        (None, "–"),
        (0, "0 %"),
        (0.5, "50 %"),
        (0.909, "90.9 %"),
        (0.9999, "99.9 %"),
        (1.0, "100 %"),
        (1.2038, "120.4 %"),
    ],
)
def test_a_share_that_is_not_all_does_not_look_like_it(share: float | None, text: str) -> None:
    assert percent(share) == text
