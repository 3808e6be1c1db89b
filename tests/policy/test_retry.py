from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.policy.classify import Verdict
from breakwater.policy.retry import NextModel, Retry, RetryPolicy, Step, Stop, after_failure, backoff_s

JITTER = st.floats(0, 1, exclude_max=True)
SERVER = Verdict("server", "ServerError", "no", 500, True, True)
CLIENT = Verdict("client", "BadRequestError", "no", 400, False, False)
LIMITED = Verdict("rate_limit", "RateLimitError", "no", 429, True, True, retry_after_s=7.0)


@pytest.mark.parametrize(("retry", "seconds"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (500, 5.0)])
def test_exponential_delays_double_up_to_their_ceiling(retry: int, seconds: float) -> None:
    assert backoff_s(RetryPolicy(), retry, 0.0) == seconds


def test_constant_delays_stay() -> None:
    policy = RetryPolicy(backoff="constant", base_s=0.3)
    assert [backoff_s(policy, retry, 0.0) for retry in range(3)] == [0.3, 0.3, 0.3]


@given(st.floats(0, 100), st.floats(0, 1000), st.integers(0, 200), JITTER)
def test_a_delay_is_within_its_bounds(base: float, above: float, retry: int, jitter: float) -> None:
    policy = RetryPolicy(base_s=base, max_delay_s=base + above)
    delay = backoff_s(policy, retry, jitter)
    assert min(base, policy.max_delay_s) <= delay <= policy.max_delay_s + base / 2


@given(st.integers(0, 100), JITTER)
def test_delays_never_shrink(retry: int, jitter: float) -> None:
    assert backoff_s(RetryPolicy(), retry + 1, jitter) >= backoff_s(RetryPolicy(), retry, jitter)


def step(verdict: Verdict, **more: Any) -> Step:
    defaults = {"policy": RetryPolicy(), "tries": 1, "is_last_model": False, "remaining_s": 60.0, "jitter": 0.0}
    return after_failure(verdict, **(defaults | more))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (step(SERVER), Retry(0.5)),
        (step(SERVER, tries=2), Retry(1.0)),
        (step(SERVER, tries=3), NextModel()),
        (step(SERVER, tries=3, is_last_model=True), Stop("error")),
        (step(CLIENT), NextModel()),
        (step(CLIENT, is_last_model=True), Stop("error")),
        (step(LIMITED), Retry(7.0)),
        (step(LIMITED, remaining_s=5.0), NextModel()),
        (step(LIMITED, remaining_s=5.0, is_last_model=True), Stop("timeout")),
        (step(SERVER, remaining_s=0.0), Stop("timeout")),
        (step(CLIENT, remaining_s=-1.0), Stop("timeout")),
    ],
)
def test_what_follows_a_failure(got: Step, expected: Step) -> None:
    assert got == expected


@given(st.integers(1, 10), st.booleans(), JITTER)
def test_a_model_is_tried_exactly_as_often_as_configured(attempts: int, last: bool, jitter: float) -> None:
    policy = RetryPolicy(max_attempts=attempts)
    tries = 1
    while isinstance(
        step(SERVER, policy=policy, tries=tries, is_last_model=last, jitter=jitter, remaining_s=1e9), Retry
    ):
        tries += 1
    assert tries == attempts


def test_a_ceiling_below_the_base_is_refused() -> None:
    with pytest.raises(ValidationError, match="must not be below base_s"):
        RetryPolicy(base_s=10, max_delay_s=5)
