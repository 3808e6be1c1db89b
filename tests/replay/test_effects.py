"""The effects of a policy on jobs, counted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.alerts.contract import Alert
from breakwater.calls.settings import RetryPolicy
from breakwater.jobs.contract.execution import Attempt, Execution, Reason
from breakwater.jobs.rules.record import status_of, totals
from breakwater.kernel.types import ms_from_time
from breakwater.replay.contract import ConfigPlan
from breakwater.replay.rules.effects import MOST_CHANGED, REFUSALS, Effects, Estimate
from breakwater.replay.rules.engine import ReplayedJob, ReplayFindings
from breakwater.replay.rules.history import AgentPolicy, Changes, LoggedAttempt, RecordedJob
from breakwater.replay.rules.report import report_of
from tests.tables import each_row

AT = datetime(2026, 11, 30, 22, tzinfo=UTC)
AGENT = AgentPolicy(("m", "n"), RetryPolicy(), None, None, 60.0, 120.0, None)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model; with `refused`, its refusal."""

    model: str = "m"
    cost: int | None = 100
    refused: Reason | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a job ends: the calls that it makes, and why without an answer."""

    calls: tuple[Call, ...] = (Call(),)
    reason: Reason | None = None
    duration_ms: int = 1_000


def attempts_of(number: int, end: End) -> list[Attempt]:
    return [
        Attempt(
            attempt_id=f"e{number}:{place}",
            execution_id=f"e{number}",
            job_id=f"j{number}",
            agent="writer",
            number=place,
            model=call.model,
            provider="p",
            started_at=AT,
            completed_at=AT,
            duration_ms=0,
            outcome="short_circuited" if call.refused else "success" if end.reason is None else "error",
            short_circuited=call.refused is not None,
            refused_reason=call.refused,
            cause="first",
            cost=0 if call.refused else call.cost,
            cost_basis="none" if call.refused else "unknown" if call.cost is None else "billed",
        )
        for place, call in enumerate(end.calls, 1)
    ]


def run_of(
    number: int, before: End, after: End | None = None, *, drawn: int = 0, unknown: bool = False, agent: str = "writer"
) -> ReplayedJob:
    """A job in a replay. It follows its record unless it has another end."""
    attempts = attempts_of(number, before)
    sums = totals(attempts, answered=before.reason is None)
    record = Execution(
        execution_id=f"e{number}",
        job_id=f"j{number}",
        agent=agent,
        status=status_of(before.reason),
        reason=before.reason,
        chosen_model=attempts[-1].model if before.reason is None else None,
        attempts=tuple(attempts),
        total_cost=sums.total_cost,
        wasted_cost=sums.wasted_cost,
        cost_basis=sums.cost_basis,
        queued_at=AT + timedelta(minutes=number),
        dispatched_at=AT + timedelta(minutes=number),
        completed_at=AT + timedelta(minutes=number, milliseconds=before.duration_ms),
        duration_ms=before.duration_ms,
    )
    job = RecordedJob(record, tuple(LoggedAttempt(place, 0, 0, attempt) for place, attempt in enumerate(attempts)))
    run = ReplayedJob(job, AGENT, AGENT, AGENT.chain, 0)
    planned = before if after is None else after
    run.attempts = attempts if after is None else attempts_of(number, after)
    run.follows = after is None
    run.reason = planned.reason
    run.ended_ms = ms_from_time(record.queued_at) + planned.duration_ms
    run.drawn = min(drawn, len(run.attempts))
    run.unknown = unknown
    run.diverges = after is not None
    return run


def effects_of(runs: Iterable[ReplayedJob], **options: bool) -> Effects:
    effects = Effects(ZoneInfo("UTC"), leaves_out_unknown=options.get("leaves_out_unknown", False))
    for run in runs:
        effects.add(run)
    return effects


def report_on(effects: Effects, changes: Changes | None = None) -> ConfigPlan:
    return report_of(effects, ReplayFindings(), changes or Changes(), AT, AT + timedelta(days=1))


REFUSED = End((Call(refused="breaker_open"),), "breaker_open", 5)
FAILED = End((Call(), Call("n")), "error", 3_000)


@each_row(
    "before, after, counted",
    [
        (End(), REFUSED, {"newly_refused": 1, "lost": 1, "sooner": 1}),
        (REFUSED, End(), {"refused_no_more": 1, "won": 1}),
        (End(), FAILED, {"lost": 1}),
        (FAILED, End(), {"won": 1, "sooner": 1}),
        (FAILED, REFUSED, {"newly_refused": 1, "sooner": 1}),
        (End(), End((Call(cost=0), Call("n"))), {"changed_model": 1}),
        (End(), End(), {}),
    ],
)
def test_a_job_that_ends_otherwise_counts_once_for_each_effect(
    before: End, after: End, counted: dict[str, int]
) -> None:
    effects = effects_of([run_of(1, before, after)])
    names = ("newly_refused", "refused_no_more", "lost", "won", "changed_model", "sooner")
    assert {name: getattr(effects, name) for name in names if getattr(effects, name)} == counted


ENDS = st.builds(
    End,
    st.lists(
        st.builds(Call, st.sampled_from("mn"), st.none() | st.integers(0, 10**9), st.none()), min_size=1, max_size=3
    ).map(tuple),
    st.sampled_from([None, None, "error", "timeout"]),
    st.integers(0, 10**6),
) | st.sampled_from([REFUSED, End((Call(refused="budget_exceeded"),), "budget_exceeded")])
REFUSED_OF_STEP = ("refused_before", "refused_after")
RUNS = st.lists(st.tuples(ENDS, st.none() | ENDS, st.integers(0, 3), st.booleans()), max_size=30)


@settings(max_examples=100)
@given(RUNS)
def test_sums_agree_and_intervals_contain_their_points(
    jobs: list[tuple[End, End | None, int, bool]],
) -> None:
    runs = [
        run_of(number, before, after, drawn=drawn if after else 0, unknown=unknown and after is not None)
        for number, (before, after, drawn, unknown) in enumerate(jobs)
    ]
    effects = effects_of(runs)
    known_runs = [run for run in runs if not run.unknown]
    assert effects.jobs == len(runs)
    assert effects.unknown == len(runs) - len(known_runs)
    was = [run.job.record.reason for run in known_runs]
    now = [run.reason for run in known_runs]
    assert effects.newly_refused - effects.refused_no_more == _refused(now) - _refused(was)
    assert effects.won - effects.lost == now.count(None) - was.count(None)
    by_step = (sum(step.before for step in effects.steps.values()), sum(step.after for step in effects.steps.values()))
    assert by_step == (effects.spend.before, effects.spend.after)
    refused_by_step = [sum(getattr(step, name) for step in effects.steps.values()) for name in REFUSED_OF_STEP]
    assert refused_by_step == [effects.refused.before, effects.refused.after]
    assert sum(effects.chanced_ends.values()) == effects.chanced
    for estimate in _estimates(effects):
        assert 0 <= estimate.low <= estimate.after <= estimate.high
    assert len(effects.most_changed) <= MOST_CHANGED
    without = effects_of(runs, leaves_out_unknown=True)
    assert (without.jobs, without.unknown, without.left_out) == (len(known_runs), 0, len(runs) - len(known_runs))


@settings(max_examples=50)
@given(st.lists(ENDS, max_size=30))
def test_an_unchanged_policy_makes_no_difference(ends: list[End]) -> None:
    effects = effects_of(run_of(number, end) for number, end in enumerate(ends))
    assert [
        *(effects.newly_refused, effects.refused_no_more, effects.lost, effects.won, effects.changed_model),
        *(effects.sooner, effects.drawn, effects.unknown),
    ] == [0] * 8
    assert effects.most_changed == []
    assert effects.calls[0] == effects.calls[1]
    for estimate in (effects.spend, effects.waste, effects.duration_ms(0.5), effects.duration_ms(0.95)):
        assert estimate.low == estimate.before == estimate.after == estimate.high


def _refused(reasons: list[Reason | None]) -> int:
    return sum(reason in REFUSALS for reason in reasons)


def _estimates(effects: Effects) -> list[Estimate]:
    return [
        effects.spend,
        effects.waste,
        *map(effects.duration_ms, (0.5, 0.95)),
        effects.of_jobs(effects.newly_refused, "refused"),
        effects.of_jobs(effects.lost, "refused", "failed"),
        effects.of_jobs(effects.won, "answered"),
    ]


def test_the_interval_of_a_duration_holds_another_run_and_is_narrower_with_more_jobs() -> None:
    chance = random.Random(3)

    def durations(jobs: int) -> list[int]:
        return [round(1_000 * chance.lognormvariate(0.0, 0.7)) for _ in range(jobs)]

    def planned(jobs: int) -> Estimate:
        effects = Effects(ZoneInfo("UTC"), jobs=jobs, diverging=jobs, chanced=jobs)
        effects._durations_after.update(durations(jobs))
        effects._durations_chanced.update(effects._durations_after)
        for own_ms in (*(5 for _ in range(19)), 1_000):  # as different from job to job as on a busy machine
            effects._own_ms.add(own_ms)
        return effects.duration_ms(0.95)

    for jobs, runs, widest in (300, 200, 0.9), (10_000, 20, 0.12):
        intervals = [planned(jobs) for _ in range(runs)]
        lived_ms = [sorted(durations(jobs))[jobs * 95 // 100 - 1] for _ in intervals]
        holds = sum(each.low <= lived <= each.high for each, lived in zip(intervals, lived_ms, strict=True))
        assert holds >= 0.85 * runs
        assert sum((each.high - each.low) / each.after for each in intervals) / runs < widest


def test_the_interval_of_a_duration_holds_a_slower_plane() -> None:
    # All jobs are cut off after 4 s, and the plane itself takes 6 ms for each.
    effects = Effects(ZoneInfo("UTC"), jobs=200, diverging=200)
    effects._durations_after.update([4_006] * 200)
    for _ in range(200):
        effects._own_ms.add(6)
    planned = effects.duration_ms(0.95)
    assert planned.low <= 4_001 < 4_011 <= planned.high
    assert planned.high - planned.low < 20


def test_the_ten_jobs_that_change_most_are_named_lost_answers_first() -> None:
    runs = [run_of(number, End(), End((Call(cost=100 + number),))) for number in range(20)]
    effects = effects_of([*runs, run_of(20, End(), REFUSED)])
    assert [job.execution_id for job in effects.most_changed] == ["e20", *(f"e{n}" for n in range(19, 10, -1))]


def test_a_job_that_only_takes_longer_is_not_named() -> None:
    effects = effects_of([run_of(1, End(), End(duration_ms=9_000)), run_of(2, End(), End((Call("n"),)))])
    assert [job.execution_id for job in effects.most_changed] == ["e2"]


def test_jobs_with_an_unknown_end_may_cost_what_they_did() -> None:
    cheap = [run_of(number, End((Call(cost=1),))) for number in range(9)]
    effects = effects_of([*cheap, run_of(9, End((Call(cost=1_000),)), End((), "error"), unknown=True)])
    assert (effects.spend.after, effects.spend.high) == (9, 1_009)


def test_another_agents_jobs_do_not_count() -> None:
    effects = Effects(ZoneInfo("UTC"), "writer")
    effects.add(run_of(1, End(), REFUSED, agent="other"))
    assert effects.jobs == 0


def test_what_history_cant_tell_is_said_in_words() -> None:
    sizeless = run_of(1, End((Call(refused="budget_exceeded"),), "budget_exceeded"))
    unpriced = run_of(2, End(), End((Call("new", cost=None),)))
    notes = report_on(effects_of([sizeless, unpriced])).notes
    assert notes == (
        "calls of unknown cost are not in the spend, as the model has no price or its usage is unknown: new 1",
        "1 refused call of an earlier version without what it would have reserved: whether it fits is not known, "
        "and it counts as fitting",
    )
    unknown = run_of(3, End(), End((), "error"), unknown=True)
    [counted] = report_on(effects_of([unknown])).notes
    assert counted == (
        "1 job would have called a model without any record, or is of an agent that the changed config lacks: "
        "the end is unknown"
    )
    left_out = report_on(effects_of([unknown], leaves_out_unknown=True))
    assert (left_out.jobs, left_out.left_out) == (0, 1)
    assert left_out.notes == ("1 job left out, whose end history can't tell",)


def test_alerts_that_are_added_and_removed_are_listed() -> None:
    def opened(key: str) -> Alert:
        return Alert.model_construct(
            key=key, title=f"Title of {key}", change="opened", first_event=key.partition("/")[0], agent="writer",
            resolved_by=None, source_id="", payload={},
        )  # fmt: skip

    recorded = Changes(alerts=[opened("breaker_open/writer/m"), opened("retries_exhausted/writer/error")])
    effects = effects_of([])
    for alert in (opened("breaker_open/writer/m"), *[opened("guard_tripped//t1")] * 2):
        effects.add_event(alert)
    report = report_on(effects, recorded)
    assert [(alert.key, alert.title, alert.before, alert.after) for alert in report.alerts] == [
        ("guard_tripped//t1", "Title of guard_tripped//t1", 0, 2),
        ("retries_exhausted/writer/error", "Title of retries_exhausted/writer/error", 1, 0),
    ]
