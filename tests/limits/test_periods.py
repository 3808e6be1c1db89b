"""Calendar days and months."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import TOTAL, period, period_named, periods_at, periods_since
from tests.tables import each_row

WINDOWS: tuple[Window, Window] = ("daily", "monthly")
BERLIN = ZoneInfo("Europe/Berlin")
HOUR_MS = 3_600_000
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1)).map(lambda moment: moment.replace(tzinfo=UTC))
ZONES = st.sampled_from(
    [
        *("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Kiritimati"),
        "America/Santiago",  # its clocks change at midnight: a day begins at 1 o'clock
        "Australia/Lord_Howe",  # by half an hour
    ]
).map(ZoneInfo)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@each_row(
    ("moment", "name", "start", "end", "hours"),
    [
        # The clocks of Berlin go forward on 29 March 2026 and back on 25 October 2026.
        ("2026-03-29T05:00Z", "2026-03-29", "2026-03-28T23:00Z", "2026-03-29T22:00Z", 23),
        ("2026-10-25T05:00Z", "2026-10-25", "2026-10-24T22:00Z", "2026-10-25T23:00Z", 25),
        ("2026-11-21T22:59:59.999Z", "2026-11-21", "2026-11-20T23:00Z", "2026-11-21T23:00Z", 24),
        ("2026-11-21T23:00Z", "2026-11-22", "2026-11-21T23:00Z", "2026-11-22T23:00Z", 24),
    ],
)
def test_a_day_is_from_midnight_to_midnight_where_the_budget_lives(
    moment: str, name: str, start: str, end: str, hours: int
) -> None:
    found = period("daily", at(moment), BERLIN)
    assert (found.name, time_from_ms(found.start_ms), time_from_ms(found.end_ms)) == (name, at(start), at(end))
    assert found.end_ms - found.start_ms == hours * HOUR_MS


@pytest.mark.parametrize("moment", ["2026-10-25T00:30Z", "2026-10-25T01:30Z"])
def test_both_times_that_the_clocks_show_half_past_two_are_in_the_same_day(moment: str) -> None:
    assert at(moment).astimezone(BERLIN).strftime("%H:%M") == "02:30"
    assert period("daily", at(moment), BERLIN) == period("daily", at("2026-10-25T12:00Z"), BERLIN)


@each_row(
    ("moment", "name", "end"),
    [
        ("2026-02-28T22:59:59.999Z", "2026-02", "2026-02-28T23:00Z"),
        ("2028-02-29T12:00Z", "2028-02", "2028-02-29T23:00Z"),
        ("2026-03-31T21:59:59.999Z", "2026-03", "2026-03-31T22:00Z"),
        ("2026-03-31T22:00Z", "2026-04", "2026-04-30T22:00Z"),
        ("2026-10-31T22:59:59.999Z", "2026-10", "2026-10-31T23:00Z"),
        ("2026-12-31T23:00Z", "2027-01", "2027-01-31T23:00Z"),
    ],
)
def test_a_month_ends_with_its_last_day(moment: str, name: str, end: str) -> None:
    found = period("monthly", at(moment), BERLIN)
    assert (found.name, time_from_ms(found.end_ms)) == (name, at(end))


def test_a_moment_has_a_day_and_a_month_each_with_its_window() -> None:
    found = periods_at(at("2026-10-31T23:00Z"), BERLIN)
    assert (found.of("daily"), found.of("monthly")) == (found.day, found.month)
    assert (found.day.name, found.month.name) == ("2026-11-01", "2026-11")
    assert (found.day.window, found.month.window) == WINDOWS
    assert found.day.start_ms == found.month.start_ms


@each_row(
    ("window", "moment", "name", "start", "end"),
    [
        ("weekly", "2026-10-25T22:59:59.999Z", "2026-W43", "2026-10-18T22:00Z", "2026-10-25T23:00Z"),
        ("weekly", "2026-12-31T12:00Z", "2026-W53", "2026-12-27T23:00Z", "2027-01-03T23:00Z"),
        ("weekly", "2027-01-03T23:00Z", "2027-W01", "2027-01-03T23:00Z", "2027-01-10T23:00Z"),
        ("quarterly", "2026-03-31T21:59:59.999Z", "2026-Q1", "2025-12-31T23:00Z", "2026-03-31T22:00Z"),
        ("quarterly", "2026-12-31T22:59Z", "2026-Q4", "2026-09-30T22:00Z", "2026-12-31T23:00Z"),
    ],
)
def test_a_week_begins_on_monday_and_a_quarter_with_its_first_month(
    window: Window, moment: str, name: str, start: str, end: str
) -> None:
    found = period(window, at(moment), BERLIN)
    assert (found.name, time_from_ms(found.start_ms), time_from_ms(found.end_ms)) == (name, at(start), at(end))


@given(MOMENTS, ZONES)
def test_a_total_never_ends(moment: datetime, zone: ZoneInfo) -> None:
    assert period("total", moment, zone) == period_named("total", zone) == TOTAL
    assert TOTAL.holds(ms_from_time(moment))
    assert TOTAL.resets_at is None
    assert periods_since(moment - timedelta(days=9), moment, zone, ["total"]) == (TOTAL,)


@given(MOMENTS, st.sampled_from([window for window in get_args(Window) if window != "total"]), ZONES)
def test_periods_follow_each_other_without_gap(moment: datetime, window: Window, zone: ZoneInfo) -> None:
    found = period(window, moment, zone)
    assert found.holds(ms_from_time(moment))
    before = period(window, time_from_ms(found.start_ms - 1), zone)
    after = period(window, time_from_ms(found.end_ms), zone)
    assert (before.end_ms, after.start_ms) == (found.start_ms, found.end_ms)
    assert before.name < found.name < after.name
    assert period_named(found.name, zone) == found


@given(MOMENTS, st.sampled_from(get_args(Window)), ZONES)
def test_a_period_is_the_same_from_its_first_to_its_last_millisecond(
    moment: datetime, window: Window, zone: ZoneInfo
) -> None:
    found = period(window, moment, zone)
    for edge in (found.start_ms, found.end_ms - 1):
        assert found.holds(edge)
        assert period(window, time_from_ms(edge), zone) == found
    assert not found.holds(found.start_ms - 1)
    assert not found.holds(found.end_ms)


@given(MOMENTS, st.timedeltas(timedelta(0), timedelta(days=70)), ZONES)
def test_all_periods_since_a_moment_are_found_once_and_in_their_order(
    earliest: datetime, ago: timedelta, zone: ZoneInfo
) -> None:
    now = earliest + ago
    found = periods_since(earliest, now, zone)
    assert [one.window for one in found] == sorted(one.window for one in found)
    for window in WINDOWS:
        of_window = [one for one in found if one.window == window]
        assert of_window[0].holds(ms_from_time(earliest))
        assert of_window[-1].holds(ms_from_time(now))
        assert all(one.end_ms == following.start_ms for one, following in pairwise(of_window))


def test_the_periods_of_the_last_three_days_at_a_months_beginning_are_of_both_months() -> None:
    found = periods_since(at("2026-10-29T22:30Z"), at("2026-11-01T22:30Z"), BERLIN)
    assert [one.name for one in found] == [
        *("2026-10-29", "2026-10-30", "2026-10-31", "2026-11-01"), "2026-10", "2026-11"
    ]  # fmt: skip
