"""Decisions that the record has later than they were made: busy and lost workers write them a while afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, CountedFailure
from breakwater.breakers.settings import BreakerRules
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import GuardEvent
from breakwater.replay.rules.breakers import ReplayedBreakers, statistics_of
from breakwater.replay.rules.history import RecordedJob, in_order
from tests.replay.test_policies import BEGIN_MS, job_of

KEY = BreakerKey("writer", "m")
RULES = BreakerRules(consecutive_failures=2, same_error=None, within_s=10, cooldown_s=1)
CALL = job_of(1, (0, 50, True)).attempts[0].attempt
COUNTS = ("iterations", "tokens", "cost", "consecutive_failures", "total_failures", "unique_errors")
OPEN = Breaker(state="open", version=3, changed_ms=BEGIN_MS, open_until_ms=BEGIN_MS + 1_000, total_failures=7)


def breakers(
    transitions: list[BreakerTransition], recorded: list[BreakerTransition], breaker: Breaker = OPEN
) -> ReplayedBreakers:
    """Returns breakers of which one is open, and becomes half-open by the call `1` when its cool-down is over."""
    replayed = ReplayedBreakers({KEY: RULES}, recorded, transitions.append)
    replayed._breakers[KEY] = breaker
    replayed.admit(KEY, "1", BEGIN_MS + 1_200, 10_000, RULES, "")
    return replayed


def refused(breaker: Breaker, **changed: Any) -> Attempt:
    refusal = {"short_circuited": True, "refused_reason": "breaker_open", "statistics": statistics_of(breaker)}
    return CALL.model_copy(update=refusal | changed)


@pytest.mark.parametrize(
    ("call", "met_ms"),
    [
        pytest.param(refused(OPEN), 999, id="a refusal by the open breaker, before its cool-down was over"),
        pytest.param(refused(replace(OPEN, total_failures=9)), 1_500, id="a refusal by another state"),
        pytest.param(CALL.model_copy(update={"breaker_version": 4}), 1_500, id="admitted by the present version"),
        pytest.param(CALL.model_copy(update={"breaker_version": 3}), 1_199, id="admitted by the one before"),
    ],
)
def test_a_call_meets_the_breaker_that_its_record_shows(call: Attempt, met_ms: int) -> None:
    assert breakers([], []).met_ms(KEY, call, BEGIN_MS + 1_500) == BEGIN_MS + met_ms


def test_a_change_of_long_ago_is_not_undone() -> None:
    assert breakers([], []).met_ms(KEY, refused(OPEN), BEGIN_MS + 9_000) == BEGIN_MS + 9_000


def test_a_probe_is_announced_when_the_record_says_so() -> None:
    transitions: list[BreakerTransition] = []
    breakers(transitions, [])
    later = transitions[0].model_copy(update={"at": time_from_ms(BEGIN_MS + 1_600)})
    breakers(transitions, [later])
    assert [ms_from_time(event.at) - BEGIN_MS for event in transitions] == [1_200, 1_600]


def test_the_errors_at_the_edge_of_a_window_are_those_of_the_same_transition() -> None:
    failure = CountedFailure(sequence=1, at_ms=BEGIN_MS + 1_200 - 10_000 - 200, error="0badc0de")

    def half_opened(recorded: list[BreakerTransition]) -> BreakerTransition:
        transitions: list[BreakerTransition] = []
        breakers(transitions, recorded, replace(OPEN, failures=(failure,)))
        return transitions[0]

    was = half_opened([])
    within = was.model_copy(update={"errors": 1})
    other = within.model_copy(update={"to_state": "isolated"})
    assert [half_opened([event]).errors for event in (was, within, other)] == [0, 1, 0]


def refused_job(number: int, at_ms: int, reason: str, waited_ms: int) -> RecordedJob:
    """A job of a task from the beginning on whose only call is refused later, after a wait for room."""
    job = job_of(number, (at_ms, 0, False), task="t")
    attempt = job.attempts[0]
    refusal = refused(OPEN, execution_id=f"j{number}", refused_reason=reason, backoff_ms=waited_ms)
    record = job.record.model_copy(update={"dispatched_at": time_from_ms(BEGIN_MS)})
    return replace(job, record=record, attempts=(attempt._replace(attempt=refusal),))


def event_of(number: int, kind: str, at_ms: int) -> GuardEvent:
    return GuardEvent.model_validate(
        {
            "event_id": f"t@1#{kind}", "kind": kind, "agent": "writer", "task_id": "t", "task_key": "t",
            "execution_id": f"j{number}", "rule": "max_iterations", "reason": "6 iterations (limit: 6)",
            "at": time_from_ms(BEGIN_MS + at_ms), **dict.fromkeys(COUNTS, 0),
        }
    )  # fmt: skip


def test_a_refusal_that_a_lost_worker_left_to_another_is_of_the_moment_at_which_it_stopped_its_task() -> None:
    jobs = [refused_job(1, 3_000, "guard_tripped", 0), refused_job(2, 7_000, "guard_tripped", 0)]
    ordered = in_order(jobs, [event_of(2, "tripped", 100)])
    assert [(job.record.execution_id, job.attempts[0].asked_ms - BEGIN_MS) for job in ordered] == [
        ("j2", 100),
        ("j1", 3_000),
    ]


@pytest.mark.parametrize(
    ("reason", "kind", "waited_ms", "begins_ms"),
    [
        pytest.param("budget_exceeded", "soft_cap", 2_995, 5, id="near a limit when it began to wait for room"),
        pytest.param("breaker_open", "soft_cap", 0, 10, id="near a limit when a lost worker asked"),
        pytest.param("budget_exceeded", "tripped", 0, 10, id="stopped by its end, not by this call"),
    ],
)
def test_a_job_is_in_its_task_before_its_call_asks_for_the_last_time(
    reason: str, kind: str, waited_ms: int, begins_ms: int
) -> None:
    [job] = in_order([refused_job(1, 3_000, reason, waited_ms)], [event_of(1, kind, 10)])
    assert (job.begins_ms - BEGIN_MS, job.attempts[0].asked_ms - BEGIN_MS) == (begins_ms, 3_000)
