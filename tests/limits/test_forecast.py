"""Where budgets are going."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from breakwater.limits.rules.budget import Forecast, Period, forecast, next_forecast, period, recent_from
from tests.tables import each_row

DAY = period("daily", datetime(2026, 11, 22, 12, tzinfo=UTC), ZoneInfo("UTC"))
MONTH = period("monthly", datetime(2026, 11, 22, 12, tzinfo=UTC), ZoneInfo("UTC"))
HOUR_MS = 3_600_000
USD = 1_000_000_000


def at(hour: float) -> int:
    return DAY.start_ms + int(hour * HOUR_MS)


@each_row(
    ("hour", "spent", "recent", "limit", "expected"),
    [
        # A steady pace of $1 an hour: as much again, whatever the cap.
        (12, 12, 3, None, Forecast(24 * USD, None)),
        (12, 12, 3, 100, Forecast(24 * USD, None)),
        # The cap is reached when the pace says, and to reach it is within it.
        (12, 12, 3, 18, Forecast(24 * USD, at(18))),
        (12, 12, 3, 24, Forecast(24 * USD, DAY.end_ms)),
        # It is reached already, or passed.
        (12, 12, 3, 12, Forecast(24 * USD, None)),
        (12, 12, 3, 5, Forecast(24 * USD, None)),
        # Nothing in the last three hours: half of the steady pace.
        (12, 12, 0, None, Forecast(18 * USD, None)),
        # All of it in the last three hours: half of $1 an hour and half of $4.
        (12, 12, 12, None, Forecast(42 * USD, None)),
        # More recent spend than there was is taken for all of it: the two came from two sources.
        (12, 12, 50, None, Forecast(42 * USD, None)),
        # In the first three hours, all is recent.
        (2, 2, 2, None, Forecast(24 * USD, None)),
        # Too early, and nothing spent.
        (0.9, 1, 1, 2, None),
        (12, 0, 0, 2, None),
    ],
)
def test_days(hour: float, spent: int, recent: int, limit: int | None, expected: Forecast | None) -> None:
    cap = None if limit is None else limit * USD
    assert forecast(DAY, at(hour), spent=spent * USD, recent=recent * USD, limit=cap) == expected


@each_row(
    ("limit", "total", "reaches"),
    [(100, 24, None), (24, 24, 24), (18, 18, 18), (12, 12, None), (5, 12, None)],
)
def test_no_more_is_expected_than_a_hard_cap_lets_be_spent(limit: int, total: int, reaches: int | None) -> None:
    expected = Forecast(total * USD, None if reaches is None else at(reaches))
    assert forecast(DAY, at(12), spent=12 * USD, recent=3 * USD, limit=limit * USD, hard=True) == expected


def test_a_cap_of_nothing_is_never_said_to_be_reached_later() -> None:
    assert forecast(DAY, at(12), spent=USD, recent=0, limit=0) == Forecast(int(1.5 * USD), None)


def test_a_period_that_is_over_or_not_begun_has_no_forecast() -> None:
    for moment in (DAY.end_ms, DAY.end_ms + HOUR_MS, DAY.start_ms - 1):
        assert forecast(DAY, moment, spent=USD, recent=USD, limit=None) is None


def test_a_month_is_reported_from_its_second_day_on() -> None:
    day_ms = 24 * HOUR_MS
    assert forecast(MONTH, MONTH.start_ms + day_ms, spent=USD, recent=USD, limit=None) is None
    predicted = forecast(MONTH, MONTH.start_ms + 3 * day_ms, spent=3 * USD, recent=3 * USD, limit=20 * USD)
    assert predicted == Forecast(30 * USD, MONTH.start_ms + 20 * day_ms)


def test_recent_is_an_eighth_of_the_period_and_never_before_it() -> None:
    assert recent_from(DAY, at(12)) == at(9)
    assert recent_from(DAY, at(1)) == DAY.start_ms


PERIODS = st.sampled_from([DAY, MONTH, period("daily", datetime(2026, 3, 29, 12, tzinfo=UTC), ZoneInfo("Europe/Rome"))])
AMOUNTS = st.integers(min_value=0, max_value=10**18)


@given(PERIODS, st.floats(min_value=0, max_value=1), AMOUNTS, AMOUNTS, st.none() | AMOUNTS)
def test_whatever_was_spent(of: Period, share: float, spent: int, recent: int, limit: int | None) -> None:
    now_ms = of.start_ms + int((of.end_ms - of.start_ms) * share)
    predicted = forecast(of, now_ms, spent=spent, recent=recent, limit=limit)
    if predicted is None:
        return
    assert predicted.total >= spent
    if limit is None or limit <= spent:
        assert predicted.reaches_ms is None
    else:
        assert (predicted.reaches_ms is not None) == (predicted.total >= limit)
    if predicted.reaches_ms is not None:
        assert now_ms <= predicted.reaches_ms <= of.end_ms
    capped = forecast(of, now_ms, spent=spent, recent=recent, limit=limit, hard=True)
    assert capped is not None
    assert capped.total <= max(spent, predicted.total if limit is None else limit)
    assert capped.reaches_ms == predicted.reaches_ms
    more = forecast(of, now_ms, spent=spent, recent=recent + 1_000, limit=limit)
    assert more is not None
    assert more.total >= predicted.total, "spending faster lately never promises less"
    if limit is not None:
        dearer = forecast(of, now_ms, spent=spent, recent=recent, limit=limit + 1_000)
        assert dearer is not None
        assert dearer.total == predicted.total, "the limit changes nothing but when it is reached"
        if dearer.reaches_ms is not None and predicted.reaches_ms is not None:
            assert dearer.reaches_ms >= predicted.reaches_ms


@given(PERIODS, st.floats(min_value=0.2, max_value=0.9), st.integers(min_value=10**6, max_value=10**15))
def test_a_pace_that_does_not_change_is_followed_exactly(of: Period, share: float, per_part: int) -> None:
    length = of.end_ms - of.start_ms
    now_ms = of.start_ms + int(length * share)
    spent, recent = per_part * (now_ms - of.start_ms), per_part * (now_ms - recent_from(of, now_ms))
    predicted = forecast(of, now_ms, spent=spent, recent=recent, limit=None)
    assert predicted == Forecast(per_part * length, None)


@given(
    hour=st.floats(1, 23.9), spent=st.integers(1, 10**12), share=st.floats(0, 1), cap=st.none() | st.integers(0, 10**12)
)
def test_the_next_period_goes_on_at_the_pace_of_this_ones_end(
    hour: float, spent: int, share: float, cap: int | None
) -> None:
    tomorrow = period("daily", datetime(2026, 11, 23, 12, tzinfo=UTC), ZoneInfo("UTC"))
    now_ms, recent = at(hour), int(spent * share)
    expected = forecast(DAY, now_ms, spent=spent, recent=recent, limit=None)
    following = next_forecast(DAY, tomorrow, now_ms, spent=spent, recent=recent, hard_cap=None)
    assert expected is not None
    assert following is not None
    remaining_ms, day_ms = DAY.end_ms - now_ms, tomorrow.end_ms - tomorrow.start_ms
    assert abs((expected.total - spent) * day_ms - following * remaining_ms) <= 2 * day_ms
    capped = next_forecast(DAY, tomorrow, now_ms, spent=spent, recent=recent, hard_cap=cap)
    assert capped == (following if cap is None else min(following, cap))
    for unknown_at, unspent in ((at(0.9), spent), (DAY.end_ms, spent), (now_ms, 0)):
        assert next_forecast(DAY, tomorrow, unknown_at, spent=unspent, recent=0, hard_cap=cap) is None
