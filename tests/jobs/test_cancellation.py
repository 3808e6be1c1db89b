"""Which cancel request holds for a job, and what a cancelled attempt says of its model, its agent and its task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest

from breakwater.alerts.rules.signals import of_execution
from breakwater.calls.rules.retry import failures_on
from breakwater.health.rules import speaks_against_health
from breakwater.jobs.contract.execution import Attempt, Cancellation, Execution, PendingCancel
from breakwater.jobs.rules.record import cancelled_by, ends_with_client, error_of, status_of, totals
from breakwater.limits.rules.guard import outcome_of
from breakwater.limits.settings import GuardRules
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)
ATTEMPT = Attempt(
    attempt_id="j1:1",
    execution_id="j1",
    job_id="j1",
    agent="writer",
    number=1,
    model="sim/m",
    provider="sim",
    started_at=NOW,
    completed_at=NOW,
    duration_ms=0,
    outcome="cancelled",
    cause="first",
    cost=7,
    cost_basis="estimated",
    error=error_of(Cancellation(by="api_key", name="ops", at=NOW)),
)


def order(name: str, *agents: str, after_s: int = 0) -> PendingCancel:
    by = Cancellation(by="program", name=name, at=NOW + timedelta(seconds=after_s))
    return PendingCancel(execution_id="j1", cancellation=by, agents=agents)


@each_row(
    ("orders", "who"),
    [
        ([], None),
        ([order("client")], "client"),
        ([order("program-desk", "support")], None),
        ([order("program-desk", "support", "writer")], "program-desk"),
        ([order("program-desk", "support"), order("client", after_s=1)], "client"),
        ([order("late", after_s=2), order("early", "writer", after_s=1)], "early"),
    ],
)
def test_the_first_that_may_cancel_jobs_of_the_agent_cancels_it(orders: list[PendingCancel], who: str | None) -> None:
    found = cancelled_by(orders, "writer")
    assert (found and found.name) == who


@pytest.mark.parametrize(
    ("cancellation", "message"),
    [
        (Cancellation(by="api_key", name="ops", reason="wrong prompt", at=NOW), "the API key 'ops': wrong prompt"),
        (Cancellation(by="program", name="program-billing", at=NOW), "the NATS user 'program-billing'"),
        (Cancellation(by="client_disconnect", at=NOW), "the client's disconnect"),
    ],
)
def test_the_error_says_who_and_why(cancellation: Cancellation, message: str) -> None:
    error = error_of(cancellation)
    assert (error.kind, error.message, error.retryable) == ("cancelled", f"cancelled by {message}", False)


@each_row(
    ("setting", "has_key", "ends"),
    [(None, False, True), (None, True, False), ("finish", False, False), ("cancel", True, True)],
)
def test_a_stream_ends_with_its_client_unless_that_can_ask_again(
    setting: Literal["finish", "cancel"] | None, has_key: bool, ends: bool
) -> None:
    assert ends_with_client(setting, has_key=has_key) == ends


def test_a_cancelled_call_says_nothing_of_its_model_and_its_cost_is_wasted() -> None:
    assert speaks_against_health(ATTEMPT) is None
    assert failures_on("sim/m", [ATTEMPT]) == {}
    sums = totals([ATTEMPT], answered=False)
    assert (sums.total_cost, sums.wasted_by_cause, sums.cost_basis) == (7, {"cancelled": 7}, "estimated")


def test_a_cancelled_job_is_no_failure_of_its_task_and_no_incident() -> None:
    assert status_of("cancelled") == "cancelled"
    execution = Execution(
        execution_id="j1",
        job_id="j1",
        agent="writer",
        status="cancelled",
        reason="cancelled",
        attempts=(ATTEMPT,),
        error=ATTEMPT.error,
        queued_at=NOW,
        dispatched_at=NOW,
        completed_at=NOW,
        duration_ms=0,
    )
    outcome = outcome_of(execution, GuardRules())
    assert (outcome.failed, outcome.called) == (None, True)
    assert of_execution(execution, None, None) == ()
