"""Bad policies are found in the record that they have left, and good ones are left alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import chain, cycle
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from breakwater.config import parse_config
from breakwater.config.edit import with_settings
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.errors import ConfigError
from breakwater.limits.contract import LimitEvent, LimitSettings
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.days import difference
from breakwater.replay.rules.grid import SettingValue, room_for, round_off, round_up
from breakwater.replay.rules.history import Policy, RecordedDays
from breakwater.replay.rules.suggest import Search, Suggestions, groups_of
from tests.replay.histories import Model, every, jobs_at, lived
from tests.tables import each_row

TIMES = every(20)


def config(budgets: Mapping[str, Any] | None = None, **writer: Any) -> str:
    agents = {"writer": {"model": "p/small", **writer}, "reader": {"model": "p/mini"}}
    providers = {"p": {"base_url": "http://127.0.0.1:9/v1"}}
    return yaml.safe_dump({"providers": providers, "agents": agents, "budgets": budgets or {}})


def search(text: str, days: RecordedDays, **options: Any) -> Suggestions:
    def policy_with(values: Mapping[tuple[str, ...], SettingValue]) -> Policy | None:
        try:
            return policy_of(parse_config(with_settings(text, values)))
        except ConfigError:
            return None

    return Search([days], policy_of(parse_config(text)), policy_with, **options).run()


def values_of(result: Suggestions) -> dict[str, SettingValue]:
    return {suggestion.setting.name: suggestion.value for suggestion in result.suggestions}


def one_hour_down(at: datetime) -> float:
    return 1.0 if at.hour == 11 and at.day % 2 else 0.05


def always(share: float) -> Any:
    return lambda _: share


def with_a_run_away(number: int) -> str:
    """Tasks of five jobs, and one that goes on and on."""
    return "run-away" if 100 <= number < 130 else f"task-{number // 5}"


DEAR_FIRST = ["p/dear", "p/mini"]
OF_CHAIN = [Model("p/small", 0.01, always(0.3)), Model("p/dear", 0.05), Model("p/mini", 0.008)]
SMALL = [Model("p/small", 0.01)]


@each_row(
    ("writer", "models", "setting", "better"),
    [
        (
            {"breaker": {"consecutive_failures": 1, "cooldown_s": 1800}, "retry": {"max_attempts": 1}},
            [Model("p/small", 0.01, always(0.1))],
            "breaker.consecutive_failures",
            {2, 3},
        ),
        ({"budget": {"daily_usd": 0.2, "enforcement": "hard"}}, SMALL, "budget.daily_usd", {0.27}),
        ({"fallback_models": DEAR_FIRST, "retry": {"max_attempts": 1}}, OF_CHAIN, "fallback_models", {"p/mini"}),
        ({"guard": {"max_iterations": 10}}, SMALL, "guard.max_iterations", {20}),
    ],
)
def test_a_bad_setting_is_found_and_its_gain_is_sure(
    writer: dict[str, Any], models: list[Model], setting: str, better: set[SettingValue]
) -> None:
    text = config(**writer)
    jobs = [*jobs_at("writer", TIMES, lambda number: f"task-{number // 15}"), *jobs_at("reader", every(60))]
    if "guard" not in writer:
        jobs = [job.model_copy(update={"task_key": None}) for job in jobs]
    result = search(text, lived(text, jobs, [*models, OF_CHAIN[2]]))
    by_name = {suggestion.setting.name: suggestion for suggestion in result.suggestions}
    suggestion = by_name[f"agents.writer.{setting}"]
    value = suggestion.value[0] if isinstance(suggestion.value, list) else suggestion.value
    assert value in better
    answered, spend = suggestion.effect.answered, suggestion.effect.spend
    assert suggestion.merit == ("spend" if setting == "fallback_models" else "answers")
    assert answered.before < answered.low if suggestion.merit == "answers" else spend.high < spend.before
    assert suggestion.effect.days == 5
    assert result.is_complete
    assert result.replays <= result.most_replays


MONTH = every(20, days=28)


def of_tenants(times: Iterable[datetime], *names: str) -> list[Execution]:
    """Jobs of tenants in turns."""
    jobs = zip(jobs_at("writer", times), cycle(names), strict=False)
    return [job.model_copy(update={"tenant": name}) for job, name in jobs]


@each_row(
    ("budgets", "of_plane", "jobs", "suggested"),
    [
        # 6.72 $ in a month, of which three weeks have 4 $, and the demand of a month with 31 such days.
        (("global", "monthly_usd", 4), None, of_tenants(MONTH, "acme"), {"budgets.global.monthly_usd": 8.2}),
        # It ends a month in which a loop has submitted twelve times as much on a day.
        (
            ("global", "monthly_usd", 8.5),
            None,
            of_tenants(
                sorted([*MONTH, *(at + timedelta(minutes=late) for at in MONTH[72:96] for late in range(1, 12))]),
                "acme",
            ),
            {},
        ),
        (
            ("acme", "daily_usd", 0.05),
            None,
            of_tenants(TIMES, "acme", "other", "third"),
            {"budgets.tenants.acme.daily_usd": 0.088},
        ),
        (("*", "daily_usd", 0.05), None, of_tenants(TIMES, "acme", "other", "third"), {}),
        (None, {"usd": 0.05, "per": "day"}, of_tenants(TIMES, "acme", "other", "third"), {"of acme": 0.088}),
        (None, {"requests": 3, "per": "day"}, of_tenants(TIMES, "acme", "other", "third"), {"of acme": 9}),
        (None, {"usd": 1, "per": "month"}, of_tenants(MONTH, "acme", "other", "third"), {"of acme": 2.8}),
        (None, {"usd": 0.05, "per": "day", "action": "alert"}, of_tenants(TIMES, "acme", "other"), {}),
    ],
)
def test_hard_limits_are_suggested_that_have_room_for_the_forecast(
    budgets: tuple[str, str, float] | None,
    of_plane: dict[str, Any] | None,
    jobs: list[Execution],
    suggested: dict[str, float],
) -> None:
    text = config()
    if budgets is not None:
        name, setting, amount = budgets
        caps = {setting: amount, "enforcement": "hard"}
        text = config({"global": caps} if name == "global" else {"tenants": {name: caps}})
    limits: list[LimitEvent] = []
    if of_plane is not None:
        after = LimitSettings.model_validate({"scope": "tenant:acme", **of_plane})
        event = {"event_id": "e", "kind": "created", "limit_id": "of acme", "scope": "tenant:acme", "after": after}
        at = TIMES[0] - timedelta(days=1)
        limits = [LimitEvent.model_validate({**event, "by": "ann", "reason": None, "at": at})]
    history = lived(text, jobs, SMALL, limits)
    refuses = "action" not in (of_plane or {})
    assert any(job.record.reason == "budget_exceeded" for job in history.jobs) == refuses
    result = search(text, history)
    assert values_of(result) == suggested
    for suggestion in result.suggestions:
        assert suggestion.effect.answered.before < suggestion.effect.answered.low
        of_scope = sum(job.tenant == "acme" for job in jobs) / (28 if len(jobs) > 500 else 10)
        assert suggestion.effect.jobs == of_scope  # others do not water its effect down


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.integers(10**12, 10**15))
def test_a_forecast_has_room_for_usual_days_and_a_run_away_day_changes_little(uses: list[int], far_more: int) -> None:
    usual = sorted(uses)[math.ceil(0.9 * len(uses)) - 1]
    assert room_for("day", uses, 1.0) == pytest.approx(1.1 * usual)
    for window, days in (("week", 7), ("month", 31), ("quarter", 92)):
        room = room_for(window, uses, 1.0)
        assert 1.1 * days * min(uses) * 0.999 <= room <= 1.1 * days * usual * 1.001
        assert room_for(window, uses, 0.5) == pytest.approx(room / 2)
        if len(uses) >= 10:  # one of ten is left out
            assert room_for(window, [*uses[1:], far_more], 1.0) <= 1.1 * days * max(uses) * 1.001


def first_seconds_of_an_hour(at: datetime) -> float:
    return 1.0 if at.minute == 0 and at.second < 2 else 0.0


BURSTS = [
    at + timedelta(seconds=seconds)
    for at in every(120, days=8)
    for seconds in (0, 0.5, 1, 1.5, 2.5, 3.5, 5, 8, 10.5, 30, 60, 61)
]


@each_row(
    ("base_s", "times", "better"),
    [
        (0.02, BURSTS, {"agents.writer.retry.base_s": (2, "answers")}),  # the outage takes two seconds
        (60, BURSTS, {"agents.writer.retry.base_s": (10, "time")}),
        (2, BURSTS, {}),
        (60, BURSTS[::12], {}),  # nobody else calls the model then: history can't tell
    ],
)
def test_a_delay_between_attempts_is_suggested_where_others_have_called_meanwhile(
    base_s: float, times: list[datetime], better: dict[str, Any]
) -> None:
    retry = {"base_s": base_s, "backoff": "constant", "max_attempts": 2}
    text = config(breaker={"consecutive_failures": 100}, retry=retry)
    model = Model("p/small", 0.01, first_seconds_of_an_hour)
    result = search(text, lived(text, jobs_at("writer", times), [model], answers_at_once=True))
    delays = [suggestion for suggestion in result.suggestions if suggestion.setting.path[-1] == "base_s"]
    assert {delay.setting.name: (delay.value, delay.merit) for delay in delays} == better


def test_a_delay_is_suggested_although_it_leads_to_a_fallback_at_another_time() -> None:
    retry = {"base_s": 4, "backoff": "constant", "max_attempts": 2}
    text = config(breaker={"consecutive_failures": 100, "same_error": 100}, retry=retry, fallback_models=["p/mini"])
    times = [at + timedelta(seconds=seconds) for at in every(240, days=8) for seconds in range(25)]
    models = [Model("p/small", 0.01, lambda at: float(at.hour == 9 and at.second < 12)), Model("p/mini", 0.01)]
    result = search(text, lived(text, jobs_at("writer", times), models, answers_at_once=True))
    by_name = {suggestion.setting.name: suggestion for suggestion in result.suggestions}
    suggestion = by_name["agents.writer.retry.base_s"]
    assert (suggestion.value, suggestion.merit) == (2, "time")


def test_the_answer_of_a_retry_does_not_tell_what_an_earlier_one_would_have_got() -> None:
    retry = {"base_s": 0.8, "backoff": "constant", "max_attempts": 2}
    text = config(breaker={"consecutive_failures": 100, "same_error": 100}, retry=retry)
    times = [at + timedelta(seconds=seconds) for at in every(240, days=8) for seconds in (0, 0.9, 1.2, 1.5)]
    model = Model("p/small", 0.01, lambda at: float(at.second == 0), median_s=0.1)
    days = lived(text, jobs_at("writer", times), [model], answers_at_once=True)
    assert all(job.record.reason is None for job in days.jobs)
    assert not any(name.endswith("base_s") for name in values_of(search(text, days)))


def test_what_a_time_limit_cuts_off_is_said_to_be_unknown() -> None:
    text = config(timeout_s=0.7)
    result = search(text, lived(text, jobs_at("writer", TIMES), SMALL))
    assert result.suggestions == []
    [experiment] = result.experiments
    assert (experiment.setting.name, experiment.setting.value, experiment.value) == (
        "agents.writer.timeout_s",
        0.7,
        1.4,
    )
    assert "no longer one is recorded" in experiment.reason


def test_a_cheaper_fallback_without_any_record_is_said_to_be_unknown() -> None:
    text = config(fallback_models=DEAR_FIRST, retry={"max_attempts": 1})
    history = lived(text, jobs_at("writer", every(40)), OF_CHAIN)
    assert search(text, history).experiments == []
    [experiment] = search(text, history, prices={"p/dear": 500, "p/mini": 80}).experiments
    assert experiment.value == ["p/mini", "p/dear"]
    assert experiment.reason.startswith("p/mini has 16 % of the price of p/dear, but ")


@each_row(
    ("writer", "models", "task_of"),
    [
        ({}, [Model("p/small", 0.01, one_hour_down)], always(None)),
        ({"budget": {"daily_usd": 0.4, "enforcement": "hard"}}, SMALL, always(None)),
        ({"timeout_s": 8}, [Model("p/small", 0.01, hangs=0.02)], always(None)),
        ({"fallback_models": DEAR_FIRST[::-1], "retry": {"max_attempts": 1}}, OF_CHAIN, always(None)),
        ({"guard": {"max_iterations": 10}}, SMALL, with_a_run_away),
    ],
)
def test_a_good_setting_is_left_alone(writer: dict[str, Any], models: list[Model], task_of: Any) -> None:
    text = config(**writer)
    times = TIMES
    if "budget" in writer:
        # One day on which a loop submits five times as much.
        times = sorted([*times, *(at + timedelta(minutes=minute) for at in times[72:96] for minute in range(1, 6))])
    history = lived(text, [*jobs_at("writer", times, task_of), *jobs_at("reader", every(60))], [*models, OF_CHAIN[2]])
    assert any(job.record.reason is not None or len(job.attempts) > 1 for job in history.jobs)  # it was at work
    result = search(text, history)
    assert (values_of(result), result.experiments) == ({}, [])


def test_calls_that_hang_need_no_longer_time_limit() -> None:
    text = config(timeout_s=60, retry={"max_attempts": 6})
    history = lived(text, jobs_at("writer", TIMES), [Model("p/small", 0.01, hangs=0.15)])
    result = search(text, history)
    [suggestion] = result.suggestions
    assert (suggestion.setting.name, suggestion.merit) == ("agents.writer.timeout_s", "time")
    assert 2 <= float(str(suggestion.value)) <= 15


def test_a_limit_over_all_agents_is_judged_by_all_of_them() -> None:
    text = config(budgets={"global": {"daily_usd": 0.3, "enforcement": "hard"}})
    jobs = [*jobs_at("writer", TIMES), *jobs_at("reader", every(60))]
    history = lived(text, jobs, [*SMALL, OF_CHAIN[2]])
    [suggestion] = search(text, history).suggestions
    assert suggestion.setting.name == "budgets.global.daily_usd"
    assert suggestion.effect.jobs == 32
    assert values_of(search(text, history, agent="reader")) == {}


def test_a_setting_of_an_agent_is_judged_with_those_it_shares_a_limit_with() -> None:
    budgets = {"global": {"daily_usd": 0.28, "enforcement": "hard"}}
    writer = {"breaker": {"consecutive_failures": 1, "cooldown_s": 3600}, "retry": {"max_attempts": 1}}
    models = [Model("p/small", 0.01, always(0.1)), OF_CHAIN[2]]
    jobs = [*jobs_at("writer", TIMES), *jobs_at("reader", every(30, hours=9))]
    suggested: list[dict[str, SettingValue]] = []
    for limit in (budgets, {}):
        text = config(limit, **writer)
        result = search(text, lived(text, jobs, models), agent="writer")
        assert result.is_complete
        assert result.replays <= result.most_replays
        suggested.append(values_of(result))
    # More answers of the one would leave less of the limit to the other, which has the last hour.
    assert suggested[0] == {}
    assert "agents.writer.breaker.consecutive_failures" in suggested[1]


def test_few_days_suggest_nothing_and_the_time_limit_ends_a_search() -> None:
    text = config(budget={"daily_usd": 0.2, "enforcement": "hard"})
    result = search(text, lived(text, jobs_at("writer", every(16, days=7)), SMALL))
    assert (result.suggestions, result.few_days, result.replays) == ([], {"writer": 7}, 0)
    history = lived(text, jobs_at("writer", TIMES), SMALL)
    for replays in range(3):
        allowed = chain([True] * replays, [False] * 9)
        result = search(text, history, goes_on=lambda allowed=allowed: next(allowed))
        assert (result.suggestions, result.is_complete, result.replays) == ([], False, replays)


def test_a_value_that_the_config_refuses_is_not_tried() -> None:
    writer = {"breaker": {"consecutive_failures": 1, "cooldown_s": 900, "cooldown_growth": 2, "max_cooldown_s": 900}}
    text = config(**writer)
    history = lived(text, jobs_at("writer", every(60)), [Model("p/small", 0.01, always(0.3))])
    result = search(text, history)
    assert 0 < result.replays < result.most_replays


@each_row(
    ("writer", "reader_task", "guarded", "apart"),
    [
        ({}, "other", {"reader"}, True),
        ({}, "task", set(), True),
        ({}, "task", {"reader"}, False),
        ({"budget": {"daily_usd": 1, "enforcement": "hard"}}, "other", set(), True),
    ],
)
def test_agents_are_replayed_together_if_they_decide_about_each_other(
    writer: dict[str, Any], reader_task: str, guarded: set[str], apart: bool
) -> None:
    jobs = [*jobs_at("writer", TIMES[:1], always("task")), *jobs_at("reader", TIMES[:1], always(reader_task))]
    text = config(**writer)
    groups = groups_of(policy_of(parse_config(text)), lived(text, jobs, [*SMALL, OF_CHAIN[2]]).jobs, guarded)
    names = {frozenset({"writer"}), frozenset({"reader"})} if apart else {frozenset({"writer", "reader"})}
    assert set(groups) == names


@given(st.floats(1e-6, 1e9))
def test_rounded_values_have_two_digits_and_are_near(value: float) -> None:
    above = round_up(value)
    assert value <= above <= value * 1.11
    assert abs(round_off(value) - value) <= value * 0.06
    assert len(f"{above:.6e}".partition("e")[0].replace(".", "").rstrip("0")) <= 2


@each_row(
    ("before", "after", "is_sure"),
    [
        ([10.0] * 4, [9.0] * 4, True),
        ([10.0] * 4, [9.0, 9.0, 10.0, 10.0], False),
        ([10.0] * 8, [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 10.0, 10.0], True),
        ([10.0], [0.0], False),
    ],
)
def test_a_difference_is_sure_if_most_days_show_it(before: list[float], after: list[float], is_sure: bool) -> None:
    estimate = difference(before, after)
    assert (estimate.high < estimate.before) == is_sure
    assert estimate.low <= estimate.after <= estimate.high
    assert difference([], []).after == pytest.approx(0)
