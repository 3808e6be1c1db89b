"""What providers say is left of their limits."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from breakwater.calls.rules.quota import DEFAULT_RESET_S, Quota, quotas

NOW = datetime(2026, 11, 29, 10, 0, tzinfo=UTC)


def test_the_headers_of_openai_and_of_anthropic_are_read() -> None:
    openai = {
        "x-ratelimit-limit-requests": "500",
        "x-ratelimit-remaining-requests": "499",
        "x-ratelimit-reset-requests": "120ms",
        "x-ratelimit-remaining-tokens": "1000",
        "x-ratelimit-limit-tokens": "30000",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert quotas(openai, NOW) == (
        Quota(False, 499, 500, 0.12),
        Quota(True, 1000, 30000, 360),
    )
    anthropic = {
        "anthropic-ratelimit-input-tokens-remaining": "0",
        "anthropic-ratelimit-input-tokens-limit": "100",
        "anthropic-ratelimit-input-tokens-reset": "2026-11-29T10:00:30Z",
        "anthropic-ratelimit-requests-remaining": "7",
    }
    assert quotas(anthropic, NOW) == (
        Quota(False, 7, None, DEFAULT_RESET_S),
        Quota(True, 0, 100, 30),
    )


def test_what_is_left_is_corrected_by_what_is_sent() -> None:
    requests, tokens = Quota(False, 2, 10, 60), Quota(True, 500, 1000, 60)
    assert (requests.less(400).remaining, tokens.less(400).remaining) == (1, 100)
    assert (tokens.fits(500), tokens.fits(501), requests.fits(10**6)) == (True, False, True)
    assert not requests.less(1).less(1).fits(1)
    assert (requests.share, tokens.less(900).share, Quota(True, 0, None, 1).share) == (0.2, 0.0, 0.0)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                f"{family}-{part}-{unit}" if family == "x-ratelimit" else f"{family}-{unit}-{part}"
                for family in ("x-ratelimit", "anthropic-ratelimit")
                for part in ("remaining", "limit", "reset")
                for unit in ("requests", "tokens")
            ]
        ),
        st.one_of(st.text(max_size=20), st.integers(-5, 10**9).map(str), st.just("6m0s")),
    )
)
def test_any_headers_give_shares_between_0_and_1(headers: dict[str, str]) -> None:
    for quota in quotas(headers, NOW):
        assert 0 <= quota.share <= 1
        assert quota.reset_s > 0
        assert quota.remaining >= 0
