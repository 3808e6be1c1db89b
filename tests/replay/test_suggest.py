"""Bad policies are found in the record that they have left, and good ones are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from breakwater.config import parse_config
from breakwater.config.edit import with_settings
from breakwater.kernel.errors import ConfigError
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.days import difference
from breakwater.replay.rules.grid import SettingValue, round_off, round_up
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
