"""What rate limits leave, in the headers of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from breakwater.dialects.rules.rate_limit_headers import anthropic_headers, duration_text, openai_headers
from breakwater.jobs.contract.execution import Allowance, CallerLimits
from tests.tables import each_row

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
REQUESTS = Allowance(limit=60, remaining=59, resets_at=NOW + timedelta(seconds=1))
TOKENS = Allowance(limit=150_000, remaining=149_984, resets_at=NOW + timedelta(minutes=6, milliseconds=1))


def test_headers_are_those_of_openai_and_of_anthropic() -> None:
    limits = CallerLimits(requests=REQUESTS, tokens=TOKENS).model_dump(mode="json")
    assert openai_headers(limits, NOW) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0.001s",
    }
    assert anthropic_headers(limits, NOW) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-11-29T12:00:01Z",
        "anthropic-ratelimit-tokens-limit": "150000",
        "anthropic-ratelimit-tokens-remaining": "149984",
        "anthropic-ratelimit-tokens-reset": "2026-11-29T12:06:01Z",
    }


def test_what_is_not_limited_and_what_has_been_reset_since_has_no_header() -> None:
    limits = CallerLimits(requests=REQUESTS).model_dump(mode="json")
    for headers_of in (openai_headers, anthropic_headers):
        assert headers_of(None, NOW) == {}
        assert len(headers_of(limits, NOW)) == 3
        assert headers_of(limits, NOW + timedelta(hours=1)) == {}, "a result that is asked for again"


@each_row(
    ("ms", "text"),
    [
        (0, "0s"),
        (17, "17ms"),
        (1_000, "1s"),
        (1_500, "1.5s"),
        (59_999, "59.999s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (90_061_500, "25h1m1.5s"),
    ],
)
def test_a_duration_is_written_as_go_does(ms: int, text: str) -> None:
    assert duration_text(timedelta(milliseconds=ms)) == text


@given(st.integers(0, 10**9))
def test_a_duration_is_read_as_what_it_was(ms: int) -> None:
    units = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
    parts = re.findall(r"([\d.]+)(ms|h|m|s)", duration_text(timedelta(milliseconds=ms)))
    assert round(sum(float(number) * units[unit] for number, unit in parts)) == ms
