"""An unchanged policy: its report shows no difference at all."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from breakwater.kernel.types import ms_from_time
from breakwater.replay.contract import ConfigPlan, PlannedChange, PlannedFigure, PlannedSpend
from breakwater.replay.rules.effects import EventCounts, cap_times
from breakwater.replay.rules.history import Changes
from tests.replay.storms import replayed
from tests.replay.test_policies import BEGIN_MS, COST, job_of, policy, storm_of

COUNTS = ("changed_model", "sooner", "unknown", "left_out", "drawn", "most_changed")


def differences_of(plan: ConfigPlan) -> list[str]:
    """The names of what a plan shows that is not as recorded, or not sure."""
    return [*_differences_of(plan)]


def _differences_of(plan: ConfigPlan) -> Iterator[str]:
    for name in type(plan).model_fields:
        match figure := getattr(plan, name):
            case PlannedFigure() | PlannedSpend() if len({figure.before, figure.after, figure.low, figure.high}) > 1:
                yield name
            case PlannedChange(before=before, after=after) if before != after:
                yield name
            case _:
                pass
    yield from (name for name in COUNTS if getattr(plan, name))
    yield from (each.name for each in plan.changes if each.before != each.after)
    yield from (each.budget for each in plan.limits if each.before != each.after)
    yield from (each.key for each in plan.alerts if each.before != each.after)
    for day in plan.days:
        if (day.spend, day.wasted) != (day.planned_spend, day.planned_wasted):
            yield day.day
    for step in plan.over_time:
        if (step.spend, step.refused) != (step.planned_spend, step.planned_refused):
            yield f"{step.at}"


def test_a_limit_is_reached_when_the_record_says_so_but_by_other_costs_when_they_reach_it() -> None:
    jobs = [job_of(number, (number * 5_000, 50, True)) for number in range(10)]
    soft = {"daily_usd": f"{10 * COST / 1e9:.9f}", "enforcement": "soft", "soft_at_percent": [100]}
    was = policy(budget=soft)
    decided = replayed(storm_of(jobs), was)[0].budgets
    # The service that announces it reads the log a while after.
    recorded = Changes(budgets=[event.model_copy(update={"at": event.at + timedelta(seconds=1)}) for event in decided])
    for plan, reached_ms in (was, 46_050), (policy(price=2.0, budget=soft), 20_050):
        findings, _ = replayed((jobs, recorded), plan, was)
        [reached] = cap_times(EventCounts.of(recorded), EventCounts.of(Changes(budgets=findings.budgets)))
        assert reached.after is not None
        assert ms_from_time(reached.after) == BEGIN_MS + reached_ms
