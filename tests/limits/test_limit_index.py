"""The limits that the plane keeps, as calls look them up, and the changes that are refused."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.config import LiveConfig, parse_config
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import LimitRaise, LimitRecord, LimitSettings
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.limit import amount_of, amount_text, limit_of
from breakwater.limits.rules.limit_changes import (
    MAX_PLANE_LIMITS,
    Author,
    LimitRefusedError,
    check_place,
    check_rights,
    delete_limit,
    raise_limit,
    set_limit,
)
from breakwater.limits.rules.limit_index import LimitIndex, PlaneLimit, PlaneLimits
from breakwater.limits.rules.scopes import CallNames, Dimensions, parse_scope
from tests.limits.limit_tables import limit_table, with_raise
from tests.tables import each_row

AT = datetime(2026, 11, 29, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
USD = 10**9
AUTHOR = Author("c1", "ops", None, AT)


def settings(scope: str, usd: str = "1", per: str = "day", **fields: Any) -> LimitSettings:
    return LimitSettings.model_validate({"scope": scope, "usd": usd, "per": per, **fields})


def kept(record: LimitRecord) -> PlaneLimit:
    return PlaneLimit.of(record, record.json_bytes())


def made(limit_id: str, scope: str, **fields: Any) -> PlaneLimit:
    return kept(set_limit(limit_id, settings(scope, **fields), None, AUTHOR))


CONFIG = """
providers: {p: {base_url: "http://127.0.0.1:1"}}
agents: {a: {model: m, budget: {daily_usd: 1, enforcement: hard}}, b: {model: m}}
budgets: {limits: [{scope: "team:*", usd: 2, per: week, until: "2026-11-29T12:00:00Z"}]}
"""


class Clock:
    def __init__(self) -> None:
        self.now = AT

    def __call__(self) -> float:
        return self.now.timestamp()


def test_a_table_follows_changes_and_ends_and_the_config_comes_first() -> None:
    clock = Clock()
    live = LiveConfig(parse_config(CONFIG), clock)
    states: dict[str, PlaneLimit] = {}

    def change(**changed: PlaneLimit | None) -> None:
        for limit_id, state in changed.items():
            if state is None:
                del states[limit_id]
            else:
                states[limit_id] = state
        live.change_limits(changed, states, f"s/{len(states)}")

    def caps(**names: Any) -> list[int | None]:
        table = live.limits()
        counters = table.counters(CallNames("b", **names), Dimensions(table.dimensions))
        return [counter.hard_limit for counter in counters if counter.hard_limit is not None]

    assert (caps(team="x"), caps(team="x", key="k")) == ([2 * USD], [2 * USD])
    change(k=made("k", "key:k", usd="3"), t=made("t", "team:x", usd="4", per="week", until=AT + HOUR))
    assert (caps(team="x", key="k"), live.limits().version) == ([3 * USD, 4 * USD], "s/2")
    change(mine=made("mine", "agent:a", usd="9"))
    assert live.limits().counter("agent:a", "daily").hard_limit == USD, "that of the config counts"
    live.reload(parse_config(CONFIG.replace("daily_usd: 1,", "")))
    assert live.limits().counter("agent:a", "daily").hard_limit == 9 * USD
    assert live.limits().version == "s/3"

    limit = limit_of("k", settings("key:k", usd="3"))
    until = AT + HOUR / 2
    limit_raise = LimitRaise(amount="7", configured="3", until=until, by="ops", reason="x", at=AT)
    change(k=kept(raise_limit(limit.id, limit_raise, limit_raise.configured, states["k"], AUTHOR, ends=False)))
    assert caps(key="k") == [7 * USD]
    clock.now = until
    assert caps(key="k") == [3 * USD], "the raise is over"
    clock.now = AT + HOUR
    assert caps(team="x") == [2 * USD], "the limit of the team is over, and that of each counts"
    clock.now = AT + 2 * HOUR
    assert caps(team="x") == [], "so is that of the config"
    change(k=None)
    assert (caps(key="k"), live.limits().any_hard) == ([], True)
    change(mine=None)
    assert (live.limits().any_hard, live.limits().dimensions) == (False, frozenset())


def test_rates_of_the_plane_are_raised_and_removed() -> None:
    live = LiveConfig(parse_config(CONFIG), Clock())
    rate = LimitSettings(scope="key:*", requests=5, per="minute")
    state = kept(set_limit("r", rate, None, AUTHOR))
    names = CallNames("b", key="k")
    live.change_limits(["r"], {"r": state}, "s/1")
    assert live.limits().rate_limits(names).windows[0].maxima == (5, None, None)
    limit_raise = LimitRaise(amount="8", configured="5", until=AT + HOUR, scope="key:k", by="ops", reason="x", at=AT)
    raised = kept(raise_limit("r", limit_raise, limit_raise.configured, state, AUTHOR, ends=False))
    live.change_limits(["r"], {"r": raised}, "s/2")
    assert live.limits().rate_limits(names).windows[0].maxima == (8, None, None)
    assert live.limits().rate_limits(CallNames("b", key="other")).windows[0].maxima == (5, None, None)
    live.change_limits(["r"], {}, "s/3")
    assert not live.limits().rate_limits(names)


SCOPES = ("plane", "agent:a", "key:*", "key:k", "user:u within team:t", "team:t within user:u", "tag:p=x")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.none() | st.tuples(st.sampled_from(SCOPES), st.sampled_from(("day", "month")), st.booleans()),
            min_size=1,
        ),
        max_size=8,
    )
)
def test_the_index_after_any_changes_is_that_of_the_limits_that_are_left(
    changes: list[dict[str, tuple[str, str, bool] | None]],
) -> None:
    index = PlaneLimits()
    left: dict[str, PlaneLimit] = {}
    for changed in changes:
        new: dict[str, PlaneLimit | None] = {}
        places = {state.limit.place for limit_id, state in left.items() if state.limit and limit_id not in changed}
        for limit_id, fields in changed.items():
            state = (
                None
                if fields is None
                else made(limit_id, fields[0], per=fields[1], action="refuse" if fields[2] else "count")
            )
            # Two limits in one place are refused where they are made.
            if state is not None and state.limit is not None and state.limit.place in places:
                state = None
            elif state is not None and state.limit is not None:
                places.add(state.limit.place)
            new[limit_id] = state
        left = {limit_id: state for limit_id, state in {**left, **new}.items() if state is not None}
        index.change(new, ms_from_time(AT))
    limits = [state.limit for state in left.values() if state.limit is not None]
    expected = LimitIndex(limits)
    assert index.by_place == expected.by_place
    assert (index.budgets, index.rates) == (expected.budgets, expected.rates)
    assert index.hard_scopes == expected.hard_scopes
    assert sorted(index.limits) == sorted(left)


def test_a_deleted_limit_is_kept_for_as_long_as_a_process_may_be_behind() -> None:
    record = set_limit("k", settings("key:k"), None, AUTHOR)
    assert (record.kept_s, record.change) == (None, "created")
    assert delete_limit(record.id, kept(record), AUTHOR).kept_s == 30 * 86_400
    ending = set_limit("k", settings("key:k", until=AT + HOUR), kept(record), AUTHOR)
    assert (ending.kept_s, ending.change, ending.before) == (30 * 86_400 + 3_600, "changed", record.limit)


@each_row(
    ("caller", "scope", "may"),
    [
        ({}, "plane", True),
        ({"team": "t"}, "team:t", False),
        ({"team": "t"}, "plane", False),
        ({"team": "t"}, "user:* within team:t", True),
        ({"team": "t"}, "user:* within team:u", False),
        ({"user": "u"}, "model:m within user:u", True),
        ({"user": "u", "team": "t"}, "user:u within team:t", False),
        ({"tags": {"p": "x"}}, "tag:p=x", False),
        ({"tags": {"p": "x"}}, "key:k within tag:p=x", True),
    ],
)
def test_who_is_bound_limits_only_parts_of_that(caller: dict[str, Any], scope: str, may: bool) -> None:
    bound = Caller("key", "id", "maker", ("limits",), AT, **caller)
    with nullcontext() if may else pytest.raises(LimitRefusedError, match="so may only limit parts of it"):
        check_rights(bound, parse_scope(scope))


def test_there_are_so_many_limits_and_combinations_and_no_more() -> None:
    table = limit_table()
    table.plane_limits.limits |= {str(number): limit_of("x", settings("key:k")) for number in range(MAX_PLANE_LIMITS)}
    with pytest.raises(LimitRefusedError, match="keeps 30,000 limits, which is the most") as refused:
        check_place(limit_of("new", settings("key:new")), table)
    assert refused.value.code == "too_many_limits"
    kinds = ("key", "user", "team", "model", "provider")
    pairs = [f"{kind}:* within {other_kind}:*" for kind, other_kind in combinations(kinds, 2)]
    limits = [limit_of(scope, settings(scope, per=per)) for scope in pairs for per in ("day", "month")]
    table = limit_table(further=limits)
    assert len(table.dimensions) == 20
    with pytest.raises(LimitRefusedError, match=r"of 20 combinations .* at most 20 are allowed") as refused:
        check_place(limit_of("new", settings("team:t")), table)
    assert (refused.value.status, refused.value.code) == (409, "too_many_dimensions")
    check_place(limit_of("new", settings("key:k within user:u")), table)
    check_place(limit_of("new", settings("agent:a")), table)


@each_row(
    ("unit", "text", "amount"),
    [("usd", "20.5", 20_500_000_000), ("usd", "0", 0), ("tokens", "400000", 400_000), ("concurrent", "3", 3)],
)
def test_an_amount_is_read_as_it_is_written(unit: Any, text: str, amount: int) -> None:
    assert amount_of(unit, text) == amount == amount_of(unit, amount_text(unit, amount))


@each_row(
    ("unit", "text"), [("tokens", "0.5"), ("usd", "0.0000000001"), ("usd", "9007200"), ("requests", "9007199254740993")]
)
def test_an_amount_that_is_too_fine_or_too_large_is_refused(unit: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"whole|finer|too large"):
        amount_of(unit, text)


def test_a_cap_for_users_within_a_tenant_may_refuse_jobs_of_that_tenant_alone() -> None:
    names = {"global": [""], "agent": ["a"], "tenant": ["acme"], "model": ["m"], "provider": ["p"]}
    for scope, expected, without_tenant in (
        ("user:* within tenant:acme", True, False),
        ("tenant:* within user:ann", True, False),
        ("user:* within tenant:other", False, False),
        ("user:ann within team:red", True, True),
    ):
        table = limit_table(further=[limit_of("l", settings(scope))])
        assert table.may_refuse(names) is expected, scope
        assert table.may_refuse(names | {"tenant": []}) is without_tenant, scope


def test_a_raise_holds_for_its_scope_alone_though_another_limit_of_the_config_has_the_id_since() -> None:
    of_key, of_user = (limit_of("budgets.limits.0.usd", settings(scope)) for scope in ("key:a", "user:b"))
    limits = with_raise(LimitTable((of_key,)), of_key, 9 * USD).plane_limits
    assert limits.raise_of(of_key, "key:a") is not None
    assert limits.raise_of(of_user, "user:b") is None
