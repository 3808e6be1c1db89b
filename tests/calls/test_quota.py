"""What providers say is left of their limits."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from breakwater.calls.rules.quota import ALL, DEFAULT_RESET_S, Quota, Room, quotas, room_in, used_up_s

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
    assert room_in([tokens], 0) == Room(0.5, tokens=500)
    assert room_in([requests, tokens], 0) == Room(0.2, tokens=500, requests=2)
    assert room_in([requests, tokens], 0, calls=1, used_tokens=400) == Room(0.1, tokens=100, requests=1)
    assert room_in([requests], 0, calls=3, used_tokens=9) == Room(0.0, requests=-1)
    assert room_in([tokens, Quota(True, 0, None, 1)], 0) == Room(0.0, tokens=0)
    assert room_in([], 0) == ALL == Room(1.0, inf, inf)


def test_a_limit_fills_up_evenly_and_is_known_no_more_once_it_is_full() -> None:
    tokens = Quota(True, 100, 1000, 60)
    shares = {0: 0.1, 30: 0.55, 60: 1.0, 600: 1.0}
    assert {age_s: room_in([tokens], age_s) for age_s in shares} == {
        age_s: Room(share, tokens=1000 * share) for age_s, share in shares.items()
    }
    unknown = Quota(False, 0, None, 10)
    assert [room_in([unknown], age_s) for age_s in (9, 10)] == [Room(0.0, requests=0), ALL]


def test_a_limit_that_is_used_up_is_spared_until_a_tenth_of_it_is_there_again() -> None:
    assert used_up_s([Quota(True, 0, 1000, 60), Quota(False, 500, 500, 0.001)]) == 6
    assert used_up_s([Quota(True, 0, 1000, 60), Quota(False, 0, None, 20)]) == 20
    assert used_up_s([Quota(True, 10, 1000, 60), Quota(False, 1, None, 20)]) == 0
    assert used_up_s([Quota(True, 0, 0, 7)]) == 7
    assert used_up_s([]) == 0


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
@example({"x-ratelimit-remaining-requests": "1", "x-ratelimit-limit-requests": "0"})
def test_any_headers_give_shares_between_0_and_1(headers: dict[str, str]) -> None:
    stated = quotas(headers, NOW)
    assert used_up_s(stated) >= 0
    for quota in stated:
        shares = [room_in([quota], age_s).share for age_s in (0.0, quota.reset_s / 2, quota.reset_s)]
        assert 0 <= shares[0] <= shares[1] <= shares[2] <= 1
        assert quota.reset_s > 0
        assert quota.remaining >= 0
