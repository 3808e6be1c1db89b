"""Which budgets a call is held against, and which thresholds a spend reaches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.config import parse_config
from breakwater.config.live import LiveConfig
from breakwater.limits.rules.budget import MAX_CACHED, Counter, LimitTable, reached_thresholds
from breakwater.limits.rules.scopes import ONLY_BASE, CallNames
from breakwater.limits.settings import Caps
from tests.limits.limit_tables import limit_table
from tests.tables import each_row

USD = 10**9
CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
agents: {writer: {model: m}}
"""
NAMES = st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=1, max_size=20)


def table(total: Any = None, agents: Any = None, tenants: Any = None) -> LimitTable:
    return limit_table(
        Caps.model_validate(total or {}),
        {name: Caps.model_validate(caps) for name, caps in (agents or {}).items()},
        {name: Caps.model_validate(caps) for name, caps in (tenants or {}).items()},
    )


def daily(**caps: Any) -> Counter:
    return table(agents={"a": {"daily_usd": "0.000001"} | caps}).counter("agent:a", "daily")


def test_a_call_is_held_against_the_budgets_of_all_of_its_agent_and_of_its_tenant() -> None:
    caps = table(
        {"monthly_usd": 9}, {"a": {"daily_usd": 5, "enforcement": "hard"}}, {"t": {"daily_usd": 3, "monthly_usd": 4}}
    )
    assert [(c.name, c.limit, c.hard_limit, c.agent, c.tenant) for c in caps.counters(CallNames("a", "t"))] == [
        ("global/daily", None, None, None, None),
        ("global/monthly", 9 * USD, None, None, None),
        ("agent:a/daily", 5 * USD, 5 * USD, "a", None),
        ("agent:a/monthly", None, None, "a", None),
        ("tenant:t/daily", 3 * USD, None, None, "t"),
        ("tenant:t/monthly", 4 * USD, None, None, "t"),
    ]
    assert [c.name for c in caps.counters(CallNames("a"))] == [
        "global/daily", "global/monthly", "agent:a/daily", "agent:a/monthly"
    ]  # fmt: skip


def test_a_tenant_that_is_not_named_has_the_caps_of_the_others_by_itself() -> None:
    caps = table(tenants={"*": {"daily_usd": 1}, "big": {"daily_usd": 8}})
    assert [caps.counter(f"tenant:{name}", "daily").limit for name in ("big", "x", "y")] == [8 * USD, USD, USD]
    assert [caps.counter(f"tenant:{name}", "daily").key for name in ("x", "y")] == ["tenant:x", "tenant:y"]
    assert table().counter("tenant:x", "daily").limit is None


def test_an_agent_that_the_config_does_not_know_is_tracked_only() -> None:
    counter = table(agents={"a": {"daily_usd": 1, "enforcement": "hard"}}).counter("agent:gone", "daily")
    assert (counter.limit, counter.enforcement) == (None, "none")


@given(NAMES, st.one_of(st.none(), NAMES))
def test_the_budget_of_a_key_is_the_one_that_a_call_is_held_against(agent: str, tenant: str | None) -> None:
    caps = table({"daily_usd": 1}, {agent: {"daily_usd": 2}}, {"*": {"daily_usd": 3}})
    held_against = caps.counters(CallNames(agent, tenant))
    assert [(counter.window, counter.key) for counter in held_against] == [*ONLY_BASE.keys(CallNames(agent, tenant))]
    assert all(caps.counter(counter.key, counter.window) == counter for counter in held_against)


def test_names_that_programs_choose_do_not_fill_the_memory() -> None:
    caps = table(tenants={"*": {"daily_usd": 1}})
    for number in range(MAX_CACHED + 5):
        assert caps.counters(CallNames("a", f"t{number}"))[4].tenant == f"t{number}"
        # What is bounded.
        cached = len(caps._cached), len(caps._counters)  # pyright: ignore[reportPrivateUsage]
        assert max(cached) <= MAX_CACHED
    assert caps == table(tenants={"*": {"daily_usd": 1}})


def test_the_names_of_today_are_cached_however_many_there_were_before() -> None:
    caps = table(tenants={"*": {"daily_usd": 1}})
    for number in range(MAX_CACHED + 1):
        caps.counters(CallNames("a", f"t{number}"))
    today = caps.counters(CallNames("a", "today"))
    assert caps.counters(CallNames("a", "today")) is today
    assert caps.counters(CallNames("a", "tomorrow"))[0] is today[0]  # the counter of all calls


def test_the_caps_that_an_agent_keeps_apply_to_its_next_call() -> None:
    live = LiveConfig(parse_config(CONFIG))
    assert live.limits().counters(CallNames("gone"))[2].limit is None
    live.keep("gone", Caps.model_validate({"daily_usd": 1, "enforcement": "hard"}))
    assert live.limits().counters(CallNames("gone"))[2].hard_limit == USD


def test_all_scopes_are_listed_once_global_first() -> None:
    caps = table(agents={"b": {}, "a": {}}, tenants={"t": {}, "*": {}})
    assert caps.keys() == ("global", "agent:b", "agent:a", "tenant:t")
    assert caps.keys({"tenant:t", "tenant:x", "agent:z"})[3:] == ("tenant:t", "agent:z", "tenant:x")


@each_row(
    ("caps", "expected"),
    [
        (table(), False),
        (table({"daily_usd": 1}), False),
        (table({"enforcement": "hard"}), False),
        (table({"enforcement": "hard", "monthly_usd": 0}), True),
        (table(agents={"a": {"enforcement": "hard", "daily_usd": 1}}), True),
        (table(tenants={"*": {"enforcement": "hard", "daily_usd": 1}}), True),
    ],
)
def test_it_is_known_whether_any_cap_must_hold(caps: LimitTable, expected: bool) -> None:
    assert caps.any_hard is expected


def test_thresholds_are_reached_to_the_nano_dollar() -> None:
    spends = (499, 500, 799, 800, 999, 1_000, 5_000)
    assert [reached_thresholds(daily(), 1_000, spent) for spent in spends] == [
        (), (50,), (50,), (50, 80), (50, 80), (50, 80, 100), (50, 80, 100)
    ]  # fmt: skip


def test_a_soft_budget_reports_exactly_the_thresholds_that_it_was_given() -> None:
    assert reached_thresholds(daily(soft_at_percent=(80, 50, 80)), 1_000, 1_000) == (50, 80)
    assert reached_thresholds(daily(soft_at_percent=()), 1_000, 1_000) == ()


def test_a_hard_cap_reports_also_that_it_is_reached() -> None:
    assert reached_thresholds(daily(soft_at_percent=(50,), enforcement="hard"), 1_000, 1_000) == (50, 100)
    assert reached_thresholds(daily(soft_at_percent=(), enforcement="hard"), 1_000, 999) == ()


def test_a_cap_that_refuses_is_reached_though_the_spend_is_below_it() -> None:
    counter = daily(soft_at_percent=(50, 80), enforcement="hard")
    assert [reached_thresholds(counter, 1_000, spent, refused=True) for spent in (10, 850, 1_000)] == [
        (100,), (50, 80, 100), (50, 80, 100)
    ]  # fmt: skip


def test_a_cap_that_was_raised_has_its_thresholds_further_up() -> None:
    assert reached_thresholds(daily(), 2_000, 1_000) == (50,)


@pytest.mark.parametrize("enforcement", ["hard", "soft"])
def test_a_cap_of_nothing_is_reached_when_it_refuses_and_by_no_spend(enforcement: str) -> None:
    counter = daily(soft_at_percent=(50,), enforcement=enforcement)
    assert [reached_thresholds(counter, 0, spent, refused=True) for spent in (0, 10**9)] == [(100,), (100,)]
    assert [reached_thresholds(counter, 0, spent) for spent in (0, 10**9)] == [(), ()]


@each_row(("limit", "enforcement"), [(None, "hard"), (None, "soft"), (0, "none"), (1_000, "none")])
def test_a_budget_without_a_cap_or_that_only_tracks_reaches_nothing(limit: int | None, enforcement: str) -> None:
    assert reached_thresholds(daily(enforcement=enforcement), limit, 10**9, refused=True) == ()


def test_a_budget_that_is_only_tracked_reports_the_thresholds_that_it_asks_for() -> None:
    counter = daily(enforcement="none", soft_at_percent=(50, 100))
    assert [reached_thresholds(counter, 1_000, spent) for spent in (499, 500, 2_000)] == [(), (50,), (50, 100)]
    assert reached_thresholds(daily(enforcement="none", soft_at_percent=()), 1_000, 2_000) == ()


@given(st.integers(1, 2**53), st.integers(1, 100))
def test_a_threshold_of_any_cap_is_reached_by_the_first_nano_dollar_that_does(limit: int, percent: int) -> None:
    counter, first = daily(soft_at_percent=(percent,)), -(-limit * percent // 100)
    assert (reached_thresholds(counter, limit, first - 1), reached_thresholds(counter, limit, first)) == (
        (),
        (percent,),
    )


@pytest.mark.parametrize("percent", [0, 101, -5])
def test_a_threshold_is_a_percentage(percent: int) -> None:
    with pytest.raises(ValidationError, match="1 to 100"):
        daily(soft_at_percent=(percent,))
