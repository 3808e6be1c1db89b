"""Changed policies on small made-up records, where what would have been is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from breakwater.breakers.rules.breaker import cooldown_ms
from breakwater.breakers.settings import BreakerRules
from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.jobs.rules.record import status_of, totals
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.breakers import JITTER
from breakwater.replay.rules.effects import Effects
from breakwater.replay.rules.engine import EDGE, LATE_ALERTER, TASK_ORDER, WORKER_LOST, ReplayFindings
from breakwater.replay.rules.history import Changes, LoggedAttempt, Policy, RecordedJob
from breakwater.replay.rules.identity import UNEXPLAINED, identity
from tests.replay.storms import Storm, replayed
from tests.tables import each_row

BEGIN_MS = 1_795_000_000_000
ERROR = ErrorInfo(kind="server", class_="ServerError", message="500", retryable=True, hash="0badc0de")
COST = 1_000
RESERVED = 1_500

Call = tuple[int, int, bool]
"""When a call was made, in milliseconds since the beginning, how long it took, and whether it was answered."""


def policy(price: float = 1.0, **agent: Any) -> Policy:
    settings: dict[str, Any] = {
        "model": "m",
        "breaker": "off",
        "guard": "off",
        "retry": {"max_attempts": 2, "base_s": 0.1},
        **agent,
    }
    document = {
        "providers": {"sim": {"base_url": "http://127.0.0.1:9/v1"}},
        "models": {"m": {"provider": "sim", "price": {"input_usd_per_mtok": price, "output_usd_per_mtok": 4 * price}}},
        "agents": {"writer": settings},
    }
    return policy_of(parse_config(repr(document)))


def job_of(number: int, *calls: Call, task: str | None = None, ends_late_ms: int = 0) -> RecordedJob:
    names = {"execution_id": f"j{number}", "job_id": f"j{number}", "agent": "writer", "task_id": task, "task_key": task}
    logged: list[LoggedAttempt] = []
    ended_ms = BEGIN_MS
    for at_ms, took_ms, is_answered in calls:
        place = len(logged) + 1
        started_at = time_from_ms(BEGIN_MS + at_ms)
        attempt = Attempt.model_validate(
            names
            | {
                "attempt_id": f"j{number}:{place}",
                "number": place,
                "model": "m",
                "provider": "sim",
                "started_at": started_at,
                "reserved_at": started_at,
                "completed_at": time_from_ms(BEGIN_MS + at_ms + took_ms),
                "duration_ms": took_ms,
                "outcome": "success" if is_answered else "error",
                "error": None if is_answered else ERROR,
                "counts_for_breaker": not is_answered,
                "tried_again": place < len(calls),
                "cause": "first" if place == 1 else "retry",
                "backoff_ms": 0 if place == 1 else 125,
                "input_tokens": 200,
                "output_tokens": 200,
                "reserved_tokens": 450,
                "cost": COST,
                "cost_basis": "billed",
                "reserved": RESERVED,
            }
        )
        ended_ms = BEGIN_MS + at_ms + took_ms
        logged.append(LoggedAttempt.of(number * 10 + place, time_from_ms(ended_ms), attempt))
    attempts = tuple(entry.attempt for entry in logged)
    reason = None if calls[-1][2] else "error"
    begun_at = time_from_ms(BEGIN_MS + calls[0][0])
    record = Execution.model_validate(
        names
        | {
            "status": status_of(reason),
            "reason": reason,
            "error": None if reason is None else ERROR,
            "requested_model": "m",
            "chosen_model": "m" if reason is None else None,
            "fallback_chain": ("m",),
            "total_cost": totals(attempts, answered=reason is None).total_cost,
            "queued_at": begun_at,
            "dispatched_at": begun_at,
            "completed_at": time_from_ms(ended_ms + ends_late_ms),
            "duration_ms": ended_ms + ends_late_ms - BEGIN_MS - calls[0][0],
        }
    )
    return RecordedJob(record, tuple(logged))


def storm_of(jobs: Sequence[RecordedJob]) -> Storm:
    return [*jobs], Changes()


def test_a_cap_that_did_not_exist_stops_calls_that_come_one_after_another() -> None:
    jobs = [job_of(number, (number * 100, 50, True)) for number in range(40)]
    capped = policy(budget={"daily_usd": "0.0000105", "enforcement": "hard"})
    _, ended = replayed(storm_of(jobs), capped, policy())
    assert sum(attempt.cost or 0 for run in ended for attempt in run.attempts) == 10 * COST
    assert [run.reason for run in ended] == [None] * 10 + ["budget_exceeded"] * 30


def test_a_call_waits_for_what_others_reserve_under_a_cap_that_did_not_exist() -> None:
    jobs = [job_of(number, (number, 100, True)) for number in range(4)]
    capped = policy(budget={"daily_usd": "0.0000034", "enforcement": "hard"})
    _, ended = replayed(storm_of(jobs), capped, policy())
    assert sum(attempt.cost or 0 for run in ended for attempt in run.attempts) == 2 * COST
    assert sorted(str(run.reason) for run in ended) == ["None"] * 2 + ["budget_exceeded"] * 2


def test_a_longer_back_off_makes_jobs_longer() -> None:
    jobs = [job_of(1, (0, 50, False), (175, 50, True))]
    findings, [run] = replayed(storm_of(jobs), policy(retry={"max_attempts": 2, "base_s": 0.4}), policy())
    assert [difference.kind for difference in findings.differences] == ["step"]
    assert run.reason is None
    assert run.ended_ms - BEGIN_MS == 50 + 500 + 50


def test_a_retry_long_after_its_own_call_fails_as_calls_of_its_time_do() -> None:
    own = job_of(1, (0, 50, False), (175, 50, False))
    later = [job_of(number, (3_000 + number * 100, 50, True)) for number in range(2, 30)]
    before = [job_of(number, (-number * 100, 50, False)) for number in range(30, 60)]
    _, ended = replayed(
        storm_of([*reversed(before), own, *later]), policy(retry={"max_attempts": 2, "base_s": 4}), policy()
    )
    assert {run.job.record.execution_id: run.reason for run in ended}["j1"] is None


def test_a_shorter_time_for_a_job_cuts_its_call_off() -> None:
    jobs = [job_of(1, (0, 900, True)), job_of(2, (0, 100, True))]
    findings, ended = replayed(storm_of(jobs), policy(total_timeout_s=0.5), policy())
    reasons = {run.job.record.execution_id: (run.reason, run.ended_ms - BEGIN_MS) for run in ended}
    assert reasons == {"j1": ("timeout", 500), "j2": (None, 100)}
    assert [attempt.cost for run in ended for attempt in run.attempts] == [COST, RESERVED]
    assert findings.followed == {}


def test_the_time_of_a_job_says_nothing_about_its_model() -> None:
    jobs = [job_of(number, (number * 1_000, 900, True)) for number in range(8)]
    strict = policy(total_timeout_s=0.5, breaker={"consecutive_failures": 1})
    findings, ended = replayed(storm_of(jobs), strict, policy())
    assert {run.reason for run in ended} == {"timeout"}
    assert findings.transitions == []


def test_an_interval_holds_its_figure_and_an_unchanged_policy_needs_none() -> None:
    jobs = [job_of(number, (number * 100, 50 + number, True)) for number in range(20)]
    jobs += [job_of(number, (number * 100, 50, False), (number * 100 + 175, 50, True)) for number in range(20, 30)]
    for changed in (
        policy(),
        policy(retry={"max_attempts": 1}),
        policy(timeout_s=0.01),
        policy(max_cost_usd="0.0000016"),
    ):
        effects = Effects(policy().zone)
        for run in replayed(storm_of(jobs), changed, policy())[1]:
            effects.add(run)
        figures = effects.refused, effects.spend, effects.waste, effects.duration_ms(0.5), effects.duration_ms(0.95)
        assert all(figure.low <= figure.after <= figure.high for figure in figures)
        assert all(figure.low == figure.high for figure in figures) == (changed == policy())


def test_none_of_a_few_jobs_says_little_of_the_next() -> None:
    effects = Effects(policy().zone, chanced=40)
    assert (effects.refused.low, effects.refused.high) == (0, 4)


def test_a_dearer_model_costs_more_and_reaches_its_cap_earlier() -> None:
    jobs = [job_of(number, (number * 100, 50, True)) for number in range(40)]
    capped = {"budget": {"daily_usd": "0.0000205", "enforcement": "hard"}}
    _, ended = replayed(storm_of(jobs), policy(price=2.0), policy())
    effects = Effects(policy().zone)
    for run in ended:
        effects.add(run)
    assert (effects.spend.before, effects.spend.after) == (40 * COST, 80 * COST)
    assert {run.ended_ms - run.job.attempts[0].asked_ms for run in ended} == {50}
    _, ended = replayed(storm_of(jobs), policy(price=2.0, **capped), policy(**capped))
    assert [run.reason for run in ended] == [None] * 9 + ["budget_exceeded"] * 31


def test_a_task_counts_a_job_when_its_worker_has_ended_it() -> None:
    guarded = policy(guard={"consecutive_failures": 1}, retry={"max_attempts": 1})
    jobs = [
        job_of(1, (0, 50, False), task="t", ends_late_ms=3_000),
        job_of(2, (1_500, 50, True), task="t"),
    ]
    findings, ended = replayed(storm_of(jobs), guarded)
    assert findings.differences == []
    assert all(run.follows for run in ended)
    assert [(event.kind, event.rule) for event in findings.guards] == [("tripped", "consecutive_failures")]


def timed(job: RecordedJob, asked_ms: int, counted_ms: int, *, refused: bool = False) -> RecordedJob:
    """A job of one call whose task tells when that asked and when it counted the job, by Redis' clock."""
    [logged] = job.attempts
    asked_at = time_from_ms(BEGIN_MS + asked_ms)
    changes: dict[str, Any] = {"task_asked_at": asked_at}
    if refused:
        changes |= {"outcome": "short_circuited", "short_circuited": True, "refused_reason": "guard_tripped", "cost": 0}
        changes |= {"error": ERROR, "ends_chain": True, "counts_for_breaker": False}
    attempt = logged.attempt.model_copy(update=changes)
    counted = {"task_counted_at": time_from_ms(BEGIN_MS + counted_ms)}
    record = job.record.model_copy(update=counted | ({"reason": "guard_tripped"} if refused else {}))
    return RecordedJob(record, (LoggedAttempt.of(logged.sequence, time_from_ms(logged.at_ms), attempt),))


def test_the_order_of_jobs_at_once_is_that_of_redis_clock() -> None:
    guarded = policy(guard={"max_iterations": 2})
    jobs = [
        timed(job_of(1, (0, 500, True), task="t"), 0, 510),
        timed(job_of(2, (5, 500, True), task="t"), 5, 511),
        # Both are beyond the limit, and the second one is the first to stop the task, a while later.
        timed(job_of(3, (80, 0, False), task="t", ends_late_ms=200), 20, 280, refused=True),
        timed(job_of(4, (70, 0, False), task="t", ends_late_ms=200), 30, 270, refused=True),
    ]
    [tripped] = replayed(storm_of(jobs), guarded)[0].guards
    assert (tripped.execution_id, tripped.reason) == ("j3", "2 iterations (limit: 2)")
    was = tripped.model_copy(
        update={"execution_id": "j4", "reason": "3 iterations (limit: 2)", "at": time_from_ms(BEGIN_MS + 60)}
    )
    recorded = Changes(guards=[was])
    findings, ended = replayed((jobs, recorded), guarded)
    parts = identity(jobs, recorded, findings)
    assert not any(parts[subject].unequal for subject in ("calls", "ends", "trips")), parts
    assert findings.races.total() == 0
    assert all(run.follows for run in ended)


def test_a_task_is_stopped_a_moment_after_the_job_that_stops_it_is_counted() -> None:
    guarded = policy(guard={"consecutive_failures": 1}, retry={"max_attempts": 1})
    jobs = [
        timed(job_of(1, (0, 50, False), task="t"), 0, 60),
        timed(job_of(2, (70, 50, True), task="t"), 70, 130),
    ]
    [trip] = replayed(storm_of(jobs[:1]), guarded)[0].guards
    recorded = Changes(guards=[trip.model_copy(update={"at": time_from_ms(BEGIN_MS + 80)})])
    findings, ended = replayed((jobs, recorded), guarded)
    assert (findings.differences, findings.races.total()) == ([], 0)
    assert [ms_from_time(event.at) - BEGIN_MS for event in findings.guards] == [80]
    assert [run.reason for run in ended] == ["error", None]
    later = timed(job_of(2, (90, 50, True), task="t"), 90, 150)
    assert replayed(([jobs[0], later], recorded), guarded)[0].differences


def test_a_changed_guard_stops_a_task_although_the_record_says_that_another_job_did() -> None:
    def guarded(**rules: Any) -> Policy:
        off = {"max_iterations": "off", "consecutive_failures": "off", "same_error": "off"}
        return policy(guard=off | rules, retry={"max_attempts": 1})

    jobs = [
        timed(job_of(1, (0, 50, False), task="t"), 0, 60),
        timed(job_of(2, (900, 0, False), task="t"), 900, 910, refused=True),
    ]
    before = guarded(max_iterations=1)
    [trip] = replayed(storm_of(jobs), before)[0].guards
    assert (trip.execution_id, trip.rule) == ("j2", "max_iterations")
    findings, ended = replayed((jobs, Changes(guards=[trip])), guarded(consecutive_failures=1), before)
    assert [(event.execution_id, event.rule) for event in findings.guards] == [("j1", "consecutive_failures")]
    assert [run.reason for run in ended] == ["error", "guard_tripped"]


def test_a_job_that_its_task_counted_for_a_lost_worker_explains_refusals_afterwards() -> None:
    guarded = policy(guard={"consecutive_failures": 1}, retry={"max_attempts": 1})
    ended = timed(job_of(1, (0, 50, False), task="t"), 0, 60)
    again = RecordedJob(ended.record.model_copy(update={"task_counted_at": None}), ended.attempts)
    admitted = timed(job_of(2, (5_000, 50, True), task="t"), 5_000, 5_060)
    assert replayed(storm_of([ended, admitted]), guarded)[0].differences
    findings, _ = replayed(storm_of([again, admitted]), guarded)
    assert (findings.differences, findings.races) == ([], {WORKER_LOST: 1, EDGE: 0, LATE_ALERTER: 0})


def cached(number: int, at_ms: int) -> RecordedJob:
    """A job of a task whose answer comes from the cache."""
    record = job_of(number, (at_ms, 5, True), task="t").record
    changes = {"cache_hit": True, "total_cost": 0, "task_counted_at": record.completed_at}
    return RecordedJob(record.model_copy(update=changes), ())


@each_row(
    ("guard", "jobs", "trips"),
    [
        (
            {"consecutive_failures": 2, "same_error": "off"},
            [
                job_of(1, (0, 50, False), task="t"),
                cached(2, 5_000),
                job_of(3, (10_000, 50, False), task="t"),
                job_of(4, (15_000, 50, True), task="t"),
            ],
            [],
        ),
        (
            {"max_iterations": 2},
            [job_of(1, (0, 50, True), task="t"), cached(2, 5_000), job_of(3, (10_000, 50, True), task="t")],
            ["2 iterations (limit: 2)"],
        ),
    ],
)
def test_an_answer_from_the_cache_counts_in_its_task(
    guard: dict[str, Any], jobs: list[RecordedJob], trips: list[str]
) -> None:
    findings, ended = replayed(storm_of(jobs), policy(guard=guard, retry={"max_attempts": 1}))
    assert [event.reason for event in findings.guards] == trips
    assert len(ended) == len(jobs)


def test_whether_the_call_of_a_lost_worker_was_admitted_is_taken_from_the_record() -> None:
    guarded = policy(guard={"max_iterations": 1})
    lost = job_of(2, (1_500, 50, True), task="t")
    [logged] = lost.attempts
    attempt = logged.attempt.model_copy(update={"outcome": "worker_lost"})
    jobs = [job_of(1, (0, 50, True), task="t"), RecordedJob(lost.record, (logged._replace(attempt=attempt),))]
    findings, ended = replayed(storm_of(jobs), guarded)
    assert findings.races["worker lost"] == 1
    assert [run.attempts[0].outcome for run in ended] == ["success", "worker_lost"]


def test_a_job_with_retries_of_its_own_ends_where_a_fallback_is_taken_away() -> None:
    job = job_of(1, (0, 50, False), (175, 50, True))
    first, second = job.attempts
    fallback = second.attempt.model_copy(update={"model": "m2", "cause": "fallback"})
    chain = {"fallback_chain": ("m", "m2"), "chosen_model": "m2"}
    own = RecordedJob(
        job.record.model_copy(update=chain | {"own_rules": ("retry",)}), (first, second._replace(attempt=fallback))
    )
    before = policy(retry={"max_attempts": 1})
    before = replace(before, agents={"writer": replace(before.agents["writer"], chain=("m", "m2"))})
    findings, [run] = replayed(storm_of([own]), before)
    assert (findings.differences, run.chosen_model) == ([], "m2")
    findings, [run] = replayed(storm_of([own]), policy(), before)
    assert [difference.kind for difference in findings.differences] == ["step"]
    assert (run.reason, len(run.attempts)) == ("error", 1)


def test_a_breaker_that_did_not_exist_explains_the_failures_that_were_alerted_on() -> None:
    jobs = [job_of(number, (number * 100, 50, False)) for number in range(3)]
    jobs.append(job_of(3, (60_000, 50, True)))
    once = {"max_attempts": 1}
    without, guarded = policy(retry=once), policy(retry=once, breaker={"consecutive_failures": 3, "cooldown_s": 300})
    recorded = Changes(alerts=replayed(storm_of(jobs), without)[0].alerts)
    assert {alert.event for alert in recorded.alerts} == {"job_dead_lettered"}
    findings, _ = replayed((jobs, recorded), guarded, without)
    assert [(alert.event, alert.change) for alert in findings.alerts] == [("breaker_open", "opened")]


def test_an_alert_on_failures_is_late_only_near_an_incident_that_explains_it() -> None:
    jobs = [job_of(number, (number * 100, 50, False)) for number in range(3)]
    jobs.append(job_of(3, (900_000, 50, True)))
    once = {"max_attempts": 1}
    [opened, resolved] = replayed(storm_of(jobs), policy(retry=once))[0].alerts
    breaker = policy(retry=once, breaker={"consecutive_failures": 3, "cooldown_s": 10_000})
    [explains] = replayed(storm_of(jobs), breaker)[0].alerts
    assert (opened.change, resolved.change, explains.event) == ("opened", "resolved", "breaker_open")
    later = resolved.model_copy(update={"at": resolved.at + timedelta(seconds=15)})
    much_later = resolved.model_copy(update={"at": resolved.at + timedelta(seconds=25)})
    for recorded, planned, causes in (
        ([opened], [], {UNEXPLAINED: 1}),
        ([opened, explains], [explains], {LATE_ALERTER: 1}),
        ([opened, resolved], [opened, later], {LATE_ALERTER: 2}),
        ([opened, resolved], [opened, much_later], {UNEXPLAINED: 2}),
    ):
        parts = identity(jobs, Changes(alerts=recorded), ReplayFindings(alerts=planned))
        assert parts["alerts"].unequal == causes


def test_a_lost_worker_explains_only_what_its_task_did_afterwards() -> None:
    lost = job_of(2, (60_000, 50, True), task="t")
    [logged] = lost.attempts
    attempt = logged.attempt.model_copy(update={"outcome": "worker_lost"})
    jobs = [job_of(1, (0, 50, True), task="t"), RecordedJob(lost.record, (logged._replace(attempt=attempt),))]
    [trip] = replayed(storm_of([job_of(1, (0, 50, False), task="t")]), policy(guard={"consecutive_failures": 1}))[
        0
    ].guards
    for at_ms, cause in (0, UNEXPLAINED), (61_000, WORKER_LOST):
        event = trip.model_copy(update={"at": time_from_ms(BEGIN_MS + at_ms)})
        assert identity(jobs, Changes(guards=[event]), ReplayFindings())["trips"].unequal == {cause: 1}


def test_the_order_of_jobs_at_once_explains_a_trip_by_the_same_rule_and_no_other() -> None:
    jobs = [
        cached(6, -10_000),
        job_of(1, (0, 100, False), task="t"),
        job_of(2, (0, 150, True), task="t"),
        job_of(3, (0, 200, False), task="t"),
        job_of(4, (90_000, 100, False), task="u"),
        job_of(5, (90_200, 100, False), task="u"),
    ]

    def planned(threshold: int) -> ReplayFindings:
        guarded = policy(guard={"consecutive_failures": threshold, "same_error": "off"}, retry={"max_attempts": 1})
        return replayed(storm_of(jobs), guarded)[0]

    right, wrong = planned(2), planned(1)
    assert [event.task_key for event in right.guards] == ["u"]
    # Redis had the two failures of the other task one after another.
    [of_u] = right.guards
    tripped = {"task_key": "t", "execution_id": "j3", "at": time_from_ms(BEGIN_MS + 160)}
    counts = {"iterations": 4, "cost": 2 * COST, "total_failures": 2}
    recorded = Changes(guards=[of_u.model_copy(update=tripped | counts), of_u])
    impossible = Changes(guards=[of_u.model_copy(update=tripped | counts | {"total_failures": 3}), of_u])
    assert identity(jobs, recorded, right)["trips"].unequal == {TASK_ORDER: 1}
    assert identity(jobs, impossible, right)["trips"].unequal == {UNEXPLAINED: 1}
    assert identity(jobs, recorded, wrong)["trips"].unequal == {UNEXPLAINED: 4}


def test_a_call_is_not_refused_after_a_shorter_cool_down_because_the_record_refused_it() -> None:
    def refused(number: int, at_ms: int) -> RecordedJob:
        job = job_of(number, (at_ms, 0, False))
        [logged] = job.attempts
        refusal = {"outcome": "short_circuited", "short_circuited": True, "refused_reason": "breaker_open", "cost": 0}
        attempt = logged.attempt.model_copy(update=refusal | {"counts_for_breaker": False})
        record = job.record.model_copy(update={"reason": "breaker_open"})
        return RecordedJob(record, (logged._replace(attempt=attempt),))

    answered = [job_of(number, (number * 100 - 1_000, 20, True)) for number in range(10)]
    failed = [job_of(10 + number, (number * 100, 20, False)) for number in range(3)]
    jobs = [*answered, *failed, *(refused(20 + number, 300 + number * 100) for number in range(40))]
    long, short = (
        policy(retry={"max_attempts": 1}, breaker={"consecutive_failures": 3, "cooldown_s": cooldown_s})
        for cooldown_s in (60, 2)
    )
    findings, _ = replayed(storm_of(jobs), long)
    assert (findings.differences, [event.to_state for event in findings.transitions]) == ([], ["open"])
    findings, _ = replayed(storm_of(jobs), short, long)
    opened, half_open = (ms_from_time(event.at) - BEGIN_MS for event in findings.transitions[:2])
    cooled_ms = opened + cooldown_ms(short.agents["writer"].breaker or BreakerRules(), 1, JITTER)
    assert cooled_ms <= half_open < cooled_ms + 100
