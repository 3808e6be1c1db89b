"""Scopes of limits as people write them, the caps that apply to a call, and the dimensions that are counted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import NEVER_FITS, LimitTable, OverBudget
from breakwater.limits.rules.refusals import budget_held, over_budget
from breakwater.limits.rules.scopes import (
    MAX_DIMENSIONS,
    ONLY_BASE,
    CallNames,
    Dimension,
    Dimensions,
    ScopePart,
    dimension_of,
    key_from_text,
    key_of,
    parse_scope,
    parts_of,
    scope_in_words,
    scope_text,
)
from tests.tables import each_row

CONFIG = """
providers: {{local: {{base_url: "http://127.0.0.1:9/v1"}}}}
defaults: {{model: m}}
cost_tags: [project]
agents: {{writer: {{budget: {{daily_usd: 1}}}}, bot: {{rate_limit: {{requests_per_minute: 5}}}}}}
budgets:
  tenants: {{"*": {{daily_usd: 7, enforcement: hard}}, own: {{monthly_usd: 9, enforcement: hard}}}}
  limits: [{}]
"""
AT = datetime(2026, 11, 22, tzinfo=UTC)
KINDS = st.sampled_from(["agent", "model", "provider", "tenant", "key", "user", "team", "tag:project", "tag:a b"])
NAMES = st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=1, max_size=20)
DIMENSIONS = st.builds(
    Dimension, st.lists(KINDS, min_size=1, max_size=2, unique=True).map(tuple), st.sampled_from(["daily", "quarterly"])
)


def caps(*limits: str) -> LimitTable:
    return parse_config(CONFIG.format(", ".join(limits))).limit_table


def cap(table: LimitTable, dimension: Dimension, names: CallNames) -> int | None:
    """The hard cap of a call in a dimension, in dollars."""
    key = dimension.key(names)
    assert key is not None
    limit = table.counter(key, dimension.window).hard_limit
    return None if limit is None else limit // 10**9


@given(st.lists(st.builds(ScopePart, KINDS, NAMES), min_size=1, max_size=2))
def test_the_parts_of_a_scope_come_back_from_its_key(parts: list[ScopePart]) -> None:
    key = key_of(parts)
    assert parts_of(key) == tuple(parts)
    assert dimension_of(key, "weekly").kinds == tuple(part.kind for part in parts)


@each_row(
    ("text", "parts"),
    [
        ("plane", [("global", "")]),
        ("key:acme-bot", [("key", "acme-bot")]),
        ("model:openai/gpt-4o:free", [("model", "openai/gpt-4o:free")]),
        ("user:*", [("user", "*")]),
        ("tag:project=web=2", [("tag:project", "web=2")]),
        ("key:acme-bot within model:gpt-4o", [("key", "acme-bot"), ("model", "gpt-4o")]),
    ],
)
def test_a_scope_is_read_as_it_is_written(text: str, parts: list[tuple[str, str]]) -> None:
    read = parse_scope(text)
    assert read == tuple(ScopePart(*part) for part in parts)
    assert key_from_text(text) == key_of(read)
    assert scope_text(key_of(read)) == text.replace("plane", "global")


def test_a_scope_is_a_part_of_a_sentence() -> None:
    scopes = ("plane", "agent:a:b", "user:ann within team:research", "tag:project=web")
    words = [scope_in_words(key_of(parse_scope(scope))) for scope in scopes]
    assert words == ["the plane", "agent a:b", "user ann within team research", "tag project=web"]


def test_a_name_with_the_word_within_is_a_name() -> None:
    assert key_from_text("agent:well within reach") == "agent:well within reach"


@each_row(
    ("limits", "problem"),
    [
        (['{scope: "keys:x", usd: 1, per: day}'], "budgets.limits.0.scope: 'keys:x' is no scope"),
        (['{scope: "key:", usd: 1, per: day}'], "'key:' is no scope"),
        (['{scope: "tag:=x", usd: 1, per: day}'], "'tag:=x' is no scope"),
        (['{scope: "user:a within user:b", usd: 1, per: day}'], "at most two different parts"),
        (['{scope: "user:a within team:b within key:c", usd: 1, per: day}'], "at most two different parts"),
        (['{scope: "user:a within plane", usd: 1, per: day}'], "'plane' is no scope"),
        (['{scope: "tag:projekt=x", usd: 1, per: day}'], "'projekt' is none of cost_tags; did you mean 'project'?"),
        (['{scope: "agent:writr", usd: 1, per: week}'], "no agent 'writr' is configured; did you mean 'writer'?"),
        (['{scope: "user:* within model:gpt", usd: 1, per: week}'], "budgets.limits.0.scope: no model 'gpt'"),
        (['{scope: "provider:open", usd: 1, per: week}'], "budgets.limits.0.scope: no provider 'open' is configured"),
        (['{scope: "user:ann*", usd: 1, per: week}'], "'ann*': names have no wildcards; `*` alone is each name"),
        (['{scope: "agent:writer", usd: 1, per: day}'], "agents.writer.budget.daily_usd limits the same scope"),
        (['{scope: "key:a", usd: 1, per: day}', '{scope: "key:a", usd: 2, per: day, action: alert}'],
         "budgets.limits.1: budgets.limits.0 limits the same scope in the same window; keep one of them"),
        (['{scope: "key:a", tokens: 1, per: hour}', '{scope: "key:a", tokens: 2, per: hour}'],
         "budgets.limits.1: budgets.limits.0 limits the same scope in the same window; keep one of them"),
        (['{scope: "agent:bot", requests: 1, per: minute}'], "agents.bot.rate_limit.requests_per_minute limits the"),
        (['{scope: "key:a", tokens: 1, per: total, action: wait}'], "a total never resets, so no call can wait"),
        (['{scope: "key:a", tokens: 1, per: day, action: alert}'], "only limits of usd can alert"),
        (['{scope: "key:a", requests: 1, per: minute, action: alert}'], "budgets.limits.0: a rate is not recorded, so"),
        (['{scope: "key:a", usd: 1, per: year}'], "budgets.limits.0.per"),
        (['{scope: "key:a", usd: -1, per: day}'], "budgets.limits.0.usd"),
        (['{scope: "key:a", usd: "123456789012345678901234567890", per: day}'], "budgets.limits.0.usd"),
        (['{scope: "key:a", usd: 1, per: day, unit: pounds}'], "budgets.limits.0.unit"),
        (['{scope: "key:a", usd: 1, per: day, thresholds: [0]}'], "budgets.limits.0.thresholds"),
        ([f'{{scope: "{one}:* within {other}:*", usd: 1, per: day}}'
          for one in ("key", "user", "team", "model", "agent") for other in ("key", "user", "team", "model", "provider")
          if one != other], "are of 21 combinations of kinds of scopes and windows; a call would count in each of "
          f"them, so at most {MAX_DIMENSIONS}"),
    ],
)  # fmt: skip
def test_a_limit_that_can_not_be_is_an_error_with_its_path(limits: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        caps(*limits)
    assert problem in str(error.value)


def test_the_most_particular_limit_of_a_scope_is_its_cap() -> None:
    table = caps(
        '{scope: "user:* within team:*", usd: 1, per: month}',
        '{scope: "user:* within team:research", usd: 2, per: month}',
        '{scope: "user:ann within team:*", usd: 3, per: month}',
        '{scope: "user:ann within team:research", usd: 4, per: month}',
        '{scope: "key:*", usd: 5, per: week}',
        '{scope: "plane", usd: 6, per: quarter}',
        '{scope: "tenant:acme", usd: 8, per: day}',
        '{scope: "tenant:*", usd: 10, per: week}',
        '{scope: "agent:*", usd: 11, per: week}',
    )
    both = Dimension(("user", "team"), "monthly")
    named = [("bob", "sales"), ("bob", "research"), ("ann", "sales"), ("ann", "research")]
    assert [cap(table, both, CallNames("a", user=user, team=team)) for user, team in named] == [1, 2, 3, 4]
    assert cap(table, Dimension(("key",), "weekly"), CallNames("a", key="k")) == 5
    assert cap(table, Dimension(("global",), "quarterly"), CallNames("a")) == 6
    # Of the section of tenants and of the list of limits alike.
    days = [cap(table, Dimension(("tenant",), "daily"), CallNames("a", name)) for name in ("acme", "else", "own")]
    assert days == [8, 7, None], "tenants['*'] is for those that the config does not name"
    assert cap(table, Dimension(("tenant",), "weekly"), CallNames("a", "own")) == 10
    assert cap(table, Dimension(("agent",), "weekly"), CallNames("writer")) == 11
    weeks = {Dimension((kind,), "weekly") for kind in ("key", "tenant", "agent")}
    assert table.dimensions == {both, *weeks, Dimension(("global",), "quarterly")}
    # A call counts only where it has all names.
    counted = Dimensions(table.dimensions)
    names: Any = {"user": "ann", "key": "k"}
    assert {window for window, _ in counted.keys(CallNames("a", **names))} == {
        "daily",
        "weekly",
        "monthly",
        "quarterly",
    }
    assert len(counted.keys(CallNames("a", **names))) == len(ONLY_BASE.keys(CallNames("a"))) + 3


def test_a_spent_limit_that_refuses_calls_precedes_those_whose_calls_wait_the_longest_first() -> None:
    table = caps(
        '{scope: "plane", usd: 1, per: day, action: wait}',
        '{scope: "plane", usd: 9, per: month, action: wait}',
        '{scope: "agent:writer", usd: 9, per: month}',
        '{scope: "agent:writer", tokens: 9, per: day}',
    )
    # Of several that are spent, the script names the first.
    counters = table.counters(CallNames("writer"), Dimensions(table.dimensions))
    assert [counter.name for counter in counters if counter.hard_limit is not None] == [
        *("agent:writer/monthly", "agent:writer/daily/tokens", "global/monthly", "global/daily"),
    ]


def test_any_scope_can_have_limits_on_rates_in_the_config() -> None:
    table = caps(
        '{scope: "key:*", requests: 60, per: minute, action: wait}',
        '{scope: "key:*", tokens: 9000, per: minute, action: wait}',
        '{scope: "key:bot", tokens: 50, per: minute}',
        '{scope: "user:* within team:red", usd: 1, per: hour, action: cheaper_model}',
        '{scope: "plane", concurrent: 7, action: wait}',
    )
    rates = table.rate_limits(CallNames("writer", key="bot", user="ann", team="red"))
    assert [(window.key, window.window, window.maxima) for window in rates.windows] == [
        ("key:bot", "minute", (60, 50, None)),
        ("user:ann\vteam:red", "hour", (None, None, 10**9)),
    ]
    assert [(slots.key, slots.limit.amount) for slots in rates.slots] == [("global", 7)]
    assert [window.key for window in table.rate_limits(CallNames("writer", key="else", user="ann")).windows] == [
        "key:else"
    ]
    assert table.dimensions == set()


def test_a_refusal_by_tokens_or_requests_says_how_many() -> None:
    table = caps('{scope: "key:*", tokens: 100, per: day}', '{scope: "key:*", requests: 5000, per: week}')
    counted = Dimensions(table.dimensions)
    tokens, requests = (counter for counter in table.counters(CallNames("a", key="bot"), counted) if counter.cap)
    error = over_budget(OverBudget(tokens, AT, 100, 50, 30, 21), "m", 60)
    assert error.message.startswith("the limit of key bot on tokens per day has no room for a call to m; it resets at")
    assert error.figures is not None
    assert error.figures.startswith(
        "It has 20 tokens of 100 tokens left (30 tokens are reserved by calls in flight), and a call to m may use "
        "up to 21 tokens. To do: lower `max_tokens`, raise the limit (budgets.limits.0.tokens, or for this day "
        "`breakwater limits raise key:bot --per day --to TOKENS --reason WHY`), or wait"
    )
    assert over_budget(OverBudget(tokens, AT, 100, 50, 30, 101), "m", 60).message == (
        "a call to m may use more than the whole of the limit of key bot on tokens per day; no such call ever fits"
    )
    never = over_budget(OverBudget(tokens, None, 100, 50, 30, 21), "m", None)
    assert "it never resets" in never.message
    assert "raise the limit (budgets.limits.0.tokens, or" in (never.figures or "")
    assert never.retry_after_s is None
    held = budget_held(OverBudget(requests, AT, 5_000, 4_998, 2, 1), "m")
    assert (held.figures or "").startswith("It has 2 requests of 5,000 requests left, 2 requests of it held by calls")


def test_a_limit_holds_where_the_section_of_the_scope_has_no_cap() -> None:
    table = caps('{scope: "agent:writer", usd: 7, per: month}', '{scope: "plane", usd: 8, per: day}')
    assert table.dimensions == set()
    names = CallNames("writer")
    assert cap(table, Dimension(("agent",), "monthly"), names) == 7
    assert cap(table, Dimension(("global",), "daily"), names) == 8
    assert table.counter("agent:writer", "daily").limit == 10**9
    assert {counter.name: counter.setting for counter in table.counters(names) if counter.hard_limit} == {
        "agent:writer/monthly": "budgets.limits.0.usd", "global/daily": "budgets.limits.1.usd"
    }  # fmt: skip


def test_names_that_no_limit_counts_take_no_memory() -> None:
    table = caps('{scope: "key:*", usd: 1, per: week}')
    for number in range(50):
        names = CallNames("a", key="k", user=f"u{number}", model=f"m{number}")
        assert len(table.counters(names, Dimensions(table.dimensions))) == 5
        assert len(table.counters(names)) == 4
    assert len(table._cached) == 2  # pyright: ignore[reportPrivateUsage]  # what is bounded


def test_the_made_up_names_of_a_dimension_are_bounded_in_whatever_window() -> None:
    table = caps('{scope: "user:*", usd: 1, per: day}', '{scope: "team:red", usd: 1, per: day}')
    cases: tuple[tuple[str, Window, bool], ...] = (
        ("user:u", "daily", True),
        ("team:blue", "daily", True),
        ("team:red", "daily", False),
        ("tenant:t", "monthly", True),
        ("key:k", "daily", False),
    )
    for key, window, is_bounded in cases:
        assert ("n" in table.counter(key, window).flags) is is_bounded, key


def test_a_call_over_the_whole_cap_of_a_user_does_not_make_its_agent_unhealthy() -> None:
    scopes = {"agent:writer": True, "plane": True, "agent:writer within user:*": False, "user:* within agent:*": False}
    table = caps(*(f'{{scope: "{scope}", usd: 1, per: week}}' for scope in scopes))
    for scope, never_fits in scopes.items():
        counter = table.counter(key_of(parse_scope(scope.replace("*", "x"))), "weekly")
        error = over_budget(OverBudget(counter, AT, limit=5, spent=0, reserved=0, amount=9), "m", 1.0)
        assert (error.class_ in NEVER_FITS) is never_fits, scope


def test_a_hard_limit_is_incomplete_until_its_dimension_has_the_past() -> None:
    table = caps('{scope: "key:k", usd: 1, per: week}', '{scope: "user:*", usd: 1, per: week, action: alert}')
    by_key, by_user = Dimension(("key",), "weekly"), Dimension(("user",), "weekly")
    named = CallNames("a", key="k", user="u")
    for dimensions, expected in (
        (ONLY_BASE, True),
        (Dimensions(pending=frozenset({by_key})), True),
        (Dimensions(frozenset({by_key})), False),
        (Dimensions(frozenset({by_user})), True),
    ):
        assert table.is_incomplete(named, dimensions) is expected
    assert not table.is_incomplete(CallNames("a", key="other", user="u"), ONLY_BASE)


@given(
    st.lists(st.sets(DIMENSIONS, max_size=MAX_DIMENSIONS), max_size=8),
    st.sets(DIMENSIONS, max_size=MAX_DIMENSIONS),
)
def test_of_however_many_configs_at_most_so_many_dimensions_are_counted(
    configs: list[set[Dimension]], complete: set[Dimension]
) -> None:
    counted = Dimensions(frozenset(complete))
    for needed in map(frozenset, configs):
        before, counted = counted, counted.including(needed)
        assert needed <= counted.complete | counted.pending
        assert counted.complete <= before.complete
        assert not counted.complete & counted.pending
        assert len(counted.complete) + len(counted.pending) <= MAX_DIMENSIONS
        assert counted.including(needed) == counted


@given(st.sets(DIMENSIONS, max_size=5), st.sets(DIMENSIONS, max_size=5))
def test_dimensions_come_back_from_their_text(complete: set[Dimension], pending: set[Dimension]) -> None:
    dimensions = Dimensions(frozenset(complete), frozenset(pending - complete))
    assert Dimensions.parse(dimensions.text) == dimensions
