"""What callers may know of rate limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.limits.rules.caller_limits import WindowState, caller_limits, is_shown_to_caller
from breakwater.limits.rules.scopes import key_of, parse_scope
from tests.tables import each_row

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@each_row(
    ("scope", "is_shown"),
    [
        ("key:acme-bot", True),
        ("user:ann", True),
        ("team:research", True),
        ("tenant:acme", True),
        ("agent:writer", True),
        ("key:acme-bot within model:gpt-4o", True),
        ("model:gpt-4o within tenant:acme", True),
        ("plane", False),
        ("model:gpt-4o", False),
        ("provider:openai", False),
        ("model:gpt-4o within provider:openai", False),
        ("tag:project=web", False),
    ],
)
def test_a_caller_may_see_its_own_limits_and_none_that_it_shares_with_strangers(scope: str, is_shown: bool) -> None:
    assert is_shown_to_caller(key_of(parse_scope(scope))) == is_shown


def test_a_caller_may_see_the_limits_of_its_task() -> None:
    assert is_shown_to_caller("task:acme/order-4711")


def window(scope: str, unit: Any = "requests", remaining: int = 5, empty_in_ms: int = 1_000) -> WindowState:
    return WindowState(scope, unit, 10, remaining, empty_in_ms)


def test_of_several_windows_the_one_with_the_least_left_counts_and_of_equals_the_longer_wait() -> None:
    windows = [
        window("key:a", remaining=3),
        window("agent:writer", remaining=2, empty_in_ms=2_000),
        window("team:t", remaining=2, empty_in_ms=1_000),
        window("model:m", remaining=0),
        window("tenant:acme", "tokens", remaining=-7),
    ]
    limits = caller_limits(windows, NOW)
    assert limits is not None
    assert limits.requests is not None
    assert (limits.requests.limit, limits.requests.remaining) == (10, 2)
    assert limits.requests.resets_at == NOW + timedelta(seconds=2)
    assert limits.tokens is not None
    assert limits.tokens.remaining == 0, "a limit that was lowered below what it counts"


def test_without_a_window_that_it_may_see_a_caller_is_told_nothing() -> None:
    for windows in ([], [window("model:m")], [window("global:"), window("provider:p", "tokens")]):
        assert caller_limits(windows, NOW) is None
    only_tokens = caller_limits([window("key:a", "tokens")], NOW)
    assert only_tokens is not None
    assert only_tokens.requests is None


SCOPES = st.sampled_from(["key:a", "user:u", "agent:w", "model:m", "provider:p", "global:"])
WINDOWS = st.builds(
    WindowState,
    SCOPES,
    st.sampled_from(["requests", "tokens"]),
    st.integers(0, 100),
    st.integers(-5, 100),
    st.integers(0, 10_000),
)


@given(st.lists(WINDOWS, max_size=6), st.randoms())
def test_the_answer_depends_on_no_order_and_on_no_window_that_is_not_shown(windows: list[WindowState], by: Any) -> None:
    limits = caller_limits(windows, NOW)
    shuffled = [each for each in windows if is_shown_to_caller(each.scope)]
    by.shuffle(shuffled)
    again = caller_limits(shuffled, NOW)
    remaining = [None if each is None else each.model_dump(exclude={"limit"}) for each in _allowances(limits)]
    assert remaining == [None if each is None else each.model_dump(exclude={"limit"}) for each in _allowances(again)]
    for unit, allowance in zip(("requests", "tokens"), _allowances(limits), strict=True):
        left = [each.remaining for each in shuffled if each.unit == unit]
        assert (allowance is None) == (not left)
        assert allowance is None or allowance.remaining == max(0, min(left))


def _allowances(limits: Any) -> list[Any]:
    return [None, None] if limits is None else [limits.requests, limits.tokens]
