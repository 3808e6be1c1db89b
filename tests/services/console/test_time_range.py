"""Time ranges: what a page's URL may name, and from when until when that is."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from breakwater.kernel.pages.tables import TableUrl
from breakwater.kernel.pages.time_range import TimeRange, time_range_of
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import time_from_ms
from tests.tables import each_row

NOW = datetime(2026, 11, 22, 12, 7, 3, tzinfo=UTC)
MOMENTS = st.integers(1_700_000_000, 1_800_000_000).map(lambda second: time_from_ms(second * 1000))


def chosen(zone: str = "UTC", now: datetime = NOW, **query: str) -> TimeRange:
    return time_range_of(TableUrl("/", query), now, ZoneInfo(zone))


@each_row(
    ("query", "bounds", "step_s", "words"),
    [
        ({"from": "2026-11-21T12:00Z", "to": "2026-11-21T13:00Z"}, "Nov 21 12:00 to Nov 21 13:00 UTC", 30, None),
        ({"from": "2026-11-21T12:00", "to": "2026-11-21T12:15:00"}, "Nov 21 12:00 to Nov 21 12:15 UTC", 10, None),
        ({"from": "2026-11-21T13:00+01:00", "to": "2026-11-21T12:01Z"}, "Nov 21 12:00 to Nov 21 12:01 UTC", 1, None),
        (
            {"from": "2026-11-21T12:00:09Z", "to": "2026-11-21T12:00:36Z"},
            "Nov 21 12:00:09 to Nov 21 12:00:36 UTC",
            1,
            None,
        ),
        # Until now, if it is open, or ends in the future.
        ({"from": "2026-11-22T12:00Z"}, "Nov 22 12:00 to Nov 22 12:07 UTC", 5, None),
        ({"from": "2026-11-22T12:00Z", "to": "2027-01-01T00:00Z"}, "Nov 22 12:00 to Nov 22 12:07 UTC", 5, None),
        # No step divides a prime number of minutes: it ends a little later.
        ({"from": "2026-11-20T00:00Z", "to": "2026-11-21T00:07Z"}, "Nov 20 00:00 to Nov 21 00:15 UTC", 900, None),
        ({"window": "yesterday"}, "Nov 21 00:00 to Nov 22 00:00 UTC", 900, "yesterday"),
        ({"window": "this month"}, "since Nov 01 00:00 UTC", 21_600, "this month"),
        ({"window": "last month"}, "Oct 01 00:00 to Nov 01 00:00 UTC", 28_800, "last month"),
        ({"window": "nonsense"}, "since Nov 21 12:00 UTC", 900, "in the last 24h"),
    ],
)
def test_a_url_names_a_time_range(query: "dict[str, str]", bounds: str, step_s: int, words: "str | None"):
    found = chosen(**query)
    assert (found.bounds, found.window.step_s) == (bounds, step_s)
    assert found.words == (words or f"from {bounds.removesuffix(' UTC')}")
    assert chosen(**found.query).window == found.window, "the URL it writes names the same"


@each_row(
    ("window", "refresh_s", "is_long"),
    [("15m", 5, False), ("1h", 5, False), ("24h", 5, False), ("x", 5, False), ("7d", 30, True), ("30d", 30, True)],
)
def test_a_page_renews_itself_as_often_as_its_window_changes(window: str, refresh_s: int, is_long: bool):
    found = chosen(window=window)
    assert (found.refresh_s, found.is_long) == (refresh_s, is_long)


@each_row(
    ("query", "why"),
    [
        ({"from": "nonsense"}, "a time such as"),
        ({"from": "2026-11-21T13:00Z", "to": "2026-11-21T12:00Z"}, "empty"),
        ({"from": "2027-11-21T13:00Z"}, "empty"),
        ({"from": "2024-11-21T13:00Z"}, "too long"),
    ],
)
def test_a_range_that_cannot_be_is_refused(query: "dict[str, str]", why: str):
    with pytest.raises(HTTPException) as refused:
        chosen(**query)
    assert refused.value.status_code == 400
    assert why in refused.value.detail


def test_months_are_those_of_budgets_also_when_clocks_change():
    october = chosen("Europe/Berlin", window="last month").window
    assert (october.start.isoformat(), october.end.isoformat()) == (
        "2026-09-30T22:00:00+00:00",
        "2026-10-31T23:00:00+00:00",
    )
    march = chosen("Europe/Berlin", datetime(2026, 4, 2, tzinfo=UTC), window="last month").window
    assert march.buckets == 743, "an hour is missing, and nothing but an hour divides the others"


def test_what_else_the_url_says_stays():
    found = chosen(by="tenant", log="spend", after="x", **{"from": "2026-11-21T12:00Z"})
    assert found.other_parameters == {"by": "tenant", "log": "spend"}
    assert ("7d", "/?by=tenant&log=spend&window=7d", False) in found.links


@given(MOMENTS, MOMENTS)
def test_a_window_holds_what_lies_between(one: datetime, other: datetime):
    start, end = min(one, other), max(one, other)
    if start == end:
        return
    window = TimeWindow.between(start, end)
    assert window.start == start
    assert 0 <= (window.end - end).total_seconds() <= window.step_s
    assert window.buckets <= 800 or window.step_s == 86_400
