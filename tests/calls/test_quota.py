"""What providers say is left of their limits."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from breakwater.calls.rules.quota import DEFAULT_RESET_S, Quota, quotas, room_in, used_up_s

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
    assert room_in([tokens], 500, 0) == (0.5, True)
    assert room_in([requests, tokens], 501, 0) == (0.2, False)
    assert room_in([requests], 10**6, 0) == (0.2, True)
    assert room_in([requests, tokens], 100, 0, calls=1, used_tokens=400) == (0.1, True)
    assert room_in([requests, tokens], 101, 0, calls=1, used_tokens=400) == (0.1, False)
    assert room_in([requests], 1, 0, calls=3, used_tokens=9) == (0.0, False)
    assert room_in([tokens, Quota(True, 0, None, 1)], 0, 0) == (0.0, True)
    assert room_in([], 10**6, 0) == (1.0, True)


def test_a_limit_fills_up_evenly_and_is_known_no_more_once_it_is_full() -> None:
    tokens = Quota(True, 100, 1000, 60)
    assert [room_in([tokens], 0, age_s)[0] for age_s in (0, 30, 60, 600)] == [0.1, 0.55, 1.0, 1.0]
    assert [room_in([tokens], needed, 30)[1] for needed in (550, 551)] == [True, False]
    unknown = Quota(False, 0, None, 10)
    assert [room_in([unknown], 1, age_s) for age_s in (9, 10)] == [(0.0, False), (1.0, True)]


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
        shares = [room_in([quota], 0, age_s)[0] for age_s in (0.0, quota.reset_s / 2, quota.reset_s)]
        assert 0 <= shares[0] <= shares[1] <= shares[2] <= 1
        assert quota.reset_s > 0
        assert quota.remaining >= 0
