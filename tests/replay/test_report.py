"""The report of a plan: its sentence, its steps of time, and its Markdown."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.breakers.contract import BreakerTransition
from breakwater.limits.contract import BudgetEvent
from breakwater.replay.contract import ConfigPlan
from breakwater.replay.rules.effects import (
    ChangedAlert,
    ChangedJob,
    DaySpend,
    Effects,
    EventCounts,
    StepFigures,
    alerts_of,
    step_ms_of,
)
from breakwater.replay.rules.engine import ReplayFindings
from breakwater.replay.rules.history import Changes
from breakwater.replay.rules.report import SHOWN_STEPS, report_of
from breakwater.replay.views import changed_limits, excesses_of, headline, limits_title, markdown_of
from tests.tables import each_row

SINCE = datetime(2026, 11, 1, tzinfo=UTC)
DAY_MS = 86_400_000


def made(*, spend: tuple[int, int] = (0, 0), openings: int = 0, **counted: Any) -> ConfigPlan:
    """The report of 1,204 jobs."""
    effects = Effects(ZoneInfo("UTC"), jobs=1_204, days={"2026-11-01": DaySpend(*spend)}, **counted)
    opened = BreakerTransition.model_construct(to_state="open", from_state="closed", rule="errors", agent="writer")
    for _ in range(openings):
        effects.add_event(opened)
    return report_of(effects, ReplayFindings(), Changes(), SINCE, SINCE + timedelta(days=1))


@each_row(
    "report, sentence",
    [
        (
            made(spend=(5_000_000_000, 5_000_000_000)),
            "0 of 1,204 jobs would have been refused, as recorded; spend would have stayed at $5.00; "
            "95 % of jobs still end within 0 ms.",
        ),
        (
            made(newly_refused=3, refused_no_more=2, spend=(12_400_000_000, 11_904_000_000), openings=2),
            "3 more of 1,204 jobs would have been refused, 2 no longer; spend −4 % ($12.40 → $11.90); "
            "2 breaker openings instead of 0.",
        ),
        (
            made(newly_refused=1, lost=5, won=2, refused_no_more=2, unknown=0, spend=(1_000_000, 1_000_000)),
            "1 more of 1,204 jobs would have been refused, 2 no longer, 5 would have lost their answer; "
            "spend would have stayed at $0.001; 95 % of jobs still end within 0 ms.",
        ),
        (
            made(newly_refused=1, unknown=4, spend=(0, 1_000_000)),
            "1 (likely 1 to 5) more of 1,204 jobs would have been refused, 4 have an unknown end; "
            "spend grows ($0.00 → $0.001); 95 % of jobs still end within 0 ms.",
        ),
    ],
)
def test_a_sentence_says_what_would_have_been(report: ConfigPlan, sentence: str) -> None:
    assert headline(report) == sentence
    assert markdown_of(report).startswith(f"**{sentence}**\n\n1,204 recorded jobs from 2026-11-01 ")


def test_a_sentence_has_the_same_intervals_as_the_figures() -> None:
    report = made(lost=5, chanced=20, chanced_ends=Counter(failed=5, answered=15))
    assert report.lost.low < report.lost.after < report.lost.high
    assert f"5 (likely {report.lost.low:.0f} to {report.lost.high:.0f}) would have lost their answer" in headline(
        report
    )


@each_row(
    "report, excesses",
    [
        (made(newly_refused=2, spend=(1_000_000, 1_050_000)), []),
        (made(newly_refused=3), ["3 jobs newly refused, more than --max-newly-refused 2"]),
        (made(newly_refused=1, unknown=1), []),
        (made(newly_refused=1, unknown=2), ["up to 3 jobs newly refused, more than --max-newly-refused 2"]),
        (made(spend=(1_000_000, 1_200_000)), ["spend grows by 20 %, more than --max-spend-increase 5 %"]),
        (
            made(spend=(1_000_000, 1_000_000), unknown=301),
            [
                "up to 301 jobs newly refused, more than --max-newly-refused 2",
                "spend grows by up to 25 %, more than --max-spend-increase 5 %",
            ],
        ),
    ],
)
def test_a_pipeline_fails_by_what_may_be(report: ConfigPlan, excesses: list[str]) -> None:
    assert excesses_of(report, 2, 0.05) == excesses


def test_time_is_shown_in_so_many_steps_that_they_can_be_told_apart() -> None:
    length_ms = 3 * DAY_MS
    step_ms = step_ms_of(length_ms)
    steps = {start_ms: StepFigures(1, 2, 3, 4) for start_ms in range(0, length_ms, step_ms)}
    effects = Effects(ZoneInfo("UTC"), step_ms=step_ms, steps=steps)
    report = report_of(effects, ReplayFindings(), Changes(), SINCE, SINCE + timedelta(days=3))
    assert SHOWN_STEPS / 4 < len(report.over_time) <= SHOWN_STEPS + 1
    sums = [
        sum(getattr(step, name) for step in report.over_time)
        for name in ("spend", "planned_spend", "refused", "planned_refused")
    ]
    assert sums == [number * len(steps) for number in (1, 2, 3, 4)]


def test_jobs_link_to_their_pages_where_the_console_is_known() -> None:
    effects = Effects(ZoneInfo("UTC"), jobs=1)
    effects._most_changed.append(ChangedJob((0, 1), "e1", "writer", "m", "error", 2, 1))
    ends = (SINCE, SINCE + timedelta(days=1))
    report = report_of(effects, ReplayFindings(), Changes(), *ends, console_url="https://plane.test")
    assert report.most_changed[0].url == "https://plane.test/executions/e1"
    assert "| [e1](https://plane.test/executions/e1) | writer |" in markdown_of(report)


def test_the_report_of_an_agent_leaves_out_what_only_others_reach() -> None:
    def reached(budget: str, scope: str, **fields: str) -> BudgetEvent:
        names = {"event_id": f"{budget}/2026-11-01/100", "scope": scope, "period": "2026-11-01", **fields}
        return BudgetEvent.model_construct(**names, kind="hard_cap", threshold_percent=100, at=SINCE)

    of_others = [
        reached("agent:reader/daily", "agent", agent="reader"),
        reached("model:m@agent:reader/daily", "model", agent="reader", within="agent:reader"),
    ]
    may_refuse_it = [
        reached("agent:writer/daily", "agent", agent="writer"),
        reached("model:m@agent:writer/daily", "model", agent="writer", within="agent:writer"),
        reached("team:ops/daily", "team", agent="reader"),  # shared, whoever's call reached it
    ]
    changes = Changes(budgets=of_others)
    for agent, listed in ("writer", may_refuse_it), (None, [*of_others, *may_refuse_it]):
        effects = Effects(ZoneInfo("UTC"), agent)
        for event in (*of_others, *may_refuse_it):
            effects.add_event(event)
        report = report_of(effects, ReplayFindings(), changes, SINCE, SINCE + timedelta(days=1))
        budgets = {event.event_id.partition("/2026")[0] for event in listed}
        assert {limit.budget for limit in report.limits} == budgets
        [thresholds] = [change for change in report.changes if change.name == "thresholds of limits"]
        assert (thresholds.before, thresholds.after) == (0 if agent else 2, len(listed))


def test_what_is_as_recorded_is_counted_and_incidents_with_one_title_are_one() -> None:
    days = [SINCE + timedelta(days=number) for number in range(3)]
    effects = Effects(ZoneInfo("UTC"), jobs=1)
    reached = [
        BudgetEvent.model_construct(
            event_id=f"agent:writer/daily/{day:%Y-%m-%d}/100",
            scope="agent",
            agent="writer",
            period=f"{day:%Y-%m-%d}",
            kind="hard_cap",
            threshold_percent=100,
            at=day,
        )
        for day in days
    ]
    for event in reached:
        effects.add_event(event)
    report = report_of(effects, ReplayFindings(), Changes(budgets=reached[:2]), SINCE, SINCE + timedelta(days=3))
    assert [limit.before for limit in changed_limits(report)] == [None]
    assert limits_title(report) == "Limits that are reached: 2 as recorded"
    of_periods = EventCounts(incidents=Counter(a=1, b=2), titles={"a": "spent", "b": "spent"})
    assert alerts_of(of_periods, EventCounts(incidents=Counter(b=1))) == [ChangedAlert("a", "spent", 3, 1)]


def test_names_break_no_table_of_markdown() -> None:
    effects = Effects(ZoneInfo("UTC"), jobs=1)
    effects._most_changed.append(ChangedJob((0, 1), "a|b<img>", "writer", "m", "budget_exceeded", 2, 1))
    effects.unpriced["m<img>"] = 1
    text = markdown_of(report_of(effects, ReplayFindings(), Changes(), SINCE, SINCE + timedelta(days=1)))
    assert "| a\\|b&lt;img> | writer | m | budget exceeded |" in text
    assert "m&lt;img> 1" in text
