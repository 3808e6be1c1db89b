from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.delays import MAX_DELAY_S, duration_s, retry_after_s, spoken_delay_s
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


@each_row(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("0.25", 0.25),
        (" 3 ", 3.0),
        ("Sat, 21 Nov 2026 10:00:30 GMT", 30.0),
        ("Sat, 21 Nov 2026 11:00:30 +0100", 30.0),
        ("Saturday, 21-Nov-26 10:00:30 GMT", 30.0),
        ("Sat Nov 21 10:00:30 2026", 30.0),
        ("Sat, 21 Nov 2026 09:00:00 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("٣", None),
        ("9" * 400, None),
        ("1795255200", None),
        ("Sat, 21 Nov 9999 10:00:30 GMT", MAX_DELAY_S),
        ("Sat, 21 Nov 99999999999999999999 10:00:30 GMT", None),
        ("Sat, 41 Nov 2026 10:00:30 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_its_forms(value: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": value}, NOW) == seconds


@pytest.mark.parametrize("name", ["retry-after-ms", "x-ms-retry-after-ms"])
def test_milliseconds_are_more_exact_than_retry_after(name: str) -> None:
    assert retry_after_s({name: "1500", "retry-after": "2"}, NOW) == 1.5
    assert retry_after_s({name: "soon", "retry-after": "2"}, NOW) == 2
    assert retry_after_s({name: "-1"}, NOW) is None


def test_a_delay_in_the_body_goes_before_resets_and_after_retry_after() -> None:
    resets = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "60s"}
    assert retry_after_s(resets, NOW, 37.0) == 37
    assert retry_after_s({"retry-after": "2", **resets}, NOW, 37.0) == 2
    assert retry_after_s({"retry-after": "soon", **resets}, NOW, -1.0) == 60
    for absurd in (math.nan, math.inf, -1.0, 1e30):
        assert retry_after_s({}, NOW, absurd) is None


@each_row(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("1h2m3.5s", 3723.5),
        ("2m59.56s", 179.56),
        ("1.5s", 1.5),
        ("37s", 37.0),
        (".5s", 0.5),
        ("500µs", 0.0005),
        ("500μs", 0.0005),
        ("100ns", 1e-7),
        ("1d", 86_400.0),
        ("60", 60.0),
        ("0s", 0.0),
        ("", None),
        ("-1s", None),
        ("s", None),
        ("1", 1.0),
        ("1s2", None),
        ("1x", None),
        ("1 s", None),
        ("NaNs", None),
        ("9" * 90 + "h", None),
        ("1" * 200 + "s", None),
    ],
)
def test_durations_are_read_as_go_and_protobuf_write_them(text: str, seconds: float | None) -> None:
    assert duration_s(text) == (None if seconds is None else pytest.approx(seconds))


def test_openais_resets_count_where_the_limit_is_used_up_and_the_longest_of_them() -> None:
    headers = {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert retry_after_s(headers, NOW) == 1
    assert retry_after_s(headers | {"x-ratelimit-remaining-tokens": "0"}, NOW) == 360
    assert retry_after_s(headers | {"x-ratelimit-remaining-requests": "1"}, NOW) is None
    assert retry_after_s({"x-ratelimit-reset-requests": "1s"}, NOW) is None


def test_anthropics_resets_are_moments() -> None:
    headers = {
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "2026-11-21T10:00:12Z",
        "anthropic-ratelimit-tokens-remaining": "5000",
        "anthropic-ratelimit-tokens-reset": "2026-11-21T11:00:00Z",
        "anthropic-ratelimit-input-tokens-remaining": "0",
        "anthropic-ratelimit-input-tokens-reset": "2026-11-21T11:00:45+01:00",
        "anthropic-ratelimit-output-tokens-remaining": "0",
        "anthropic-ratelimit-output-tokens-reset": "2026-11-21T09:00:00Z",
    }
    assert retry_after_s(headers, NOW) == 45
    assert retry_after_s(headers | {"anthropic-ratelimit-input-tokens-remaining": "10"}, NOW) == 12
    assert retry_after_s(headers | {"anthropic-ratelimit-tokens-remaining": "0"}, NOW) == 3600
    for garbage in ("tomorrow", "2026-11-21T10:00:12", "2026-13-41T10:00:12Z", ""):
        one = {
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-requests-reset": garbage,
        }
        assert retry_after_s(one, NOW) is None


@each_row(
    ("text", "seconds"),
    [
        ("Limit 10000, Used 9000, Requested 2000. Please try again in 6.2s. Visit the site.", 6.2),
        ("Please try again in 1m30.5s.", 90.5),
        ("Please try again in 20ms.", 0.02),
        ("Please retry after 6 seconds.", 6.0),
        ("Please retry in 37.566s.", 37.566),
        ("Rate limit is exceeded. Try again in 1 second.", 1.0),
        ("Try again in 2 minutes", 120.0),
        ("Please try again in a moment.", None),
        ("Please try again in 5 attempts.", None),
        ("Please try again later", None),
        ("", None),
    ],
)
def test_a_delay_in_words_is_understood(text: str, seconds: float | None) -> None:
    assert spoken_delay_s(text) == seconds


NAMES = [
    "retry-after",
    "retry-after-ms",
    "x-ms-retry-after-ms",
    *(f"x-ratelimit-{what}-{limit}" for what in ("remaining", "reset") for limit in ("requests", "tokens")),
    *(f"anthropic-ratelimit-{limit}-{what}" for what in ("remaining", "reset") for limit in ("requests", "tokens")),
]
DATES = st.datetimes().map(lambda moment: moment.strftime("%a, %d %b %Y %H:%M:%S GMT"))
OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(timezones=OFFSETS).map(lambda moment: moment.isoformat())
VALUES = st.text() | st.just("0") | st.from_regex(r"[0-9.smhu:,+-]{0,20}") | DATES | MOMENTS | st.floats().map(str)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES), st.floats() | st.none())
def test_a_delay_is_sane_or_none_whatever_is_sent(headers: dict[str, str], in_body: float | None) -> None:
    delay = retry_after_s(headers, NOW, in_body)
    assert delay is None or 0 <= delay <= MAX_DELAY_S


@settings(deadline=None)
@given(st.text() | st.from_regex(r"[0-9.]{0,5}(ns|us|ms|s|m|h|d)[0-9.smh]{0,9}"))
def test_no_text_breaks_a_duration(text: str) -> None:
    for delay in (duration_s(text), spoken_delay_s(f"try again in {text}")):
        assert delay is None or 0 <= delay <= MAX_DELAY_S


@settings(deadline=None)
@given(st.integers(0, 86_400_000))
def test_a_duration_and_a_moment_of_the_same_length_are_the_same_wait(ms: int) -> None:
    hours, rest = divmod(ms, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    go = {
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": f"{hours}h{minutes}m{rest / 1000}s",
    }
    rfc = {
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": (NOW + timedelta(milliseconds=ms)).isoformat(),
    }
    assert retry_after_s(go, NOW) == pytest.approx(ms / 1000)
    assert retry_after_s(rfc, NOW) == pytest.approx(ms / 1000)
