"""`breakwater plans`, against a stub of the HTTP interface."""

from __future__ import annotations

from typing import Any

import pytest

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

PLAN: dict[str, Any] = {
    "plan_id": "report-47",
    "state": "partial",
    "refusal": None,
    "jobs_by_status": {"succeeded": 2, "dead_lettered": 1},
    "total_cost": "0.000042000",
    "wasted_cost": "0.000002000",
    "cost_basis": "estimated",
    "first_queued_at": "2026-11-21T10:00:00.000Z",
    "last_completed_at": "2026-11-21T10:00:02.000Z",
    "jobs": [],
}
REFUSED = PLAN | {"plan_id": "p2", "state": "failed", "refusal": "the agent is down", "jobs_by_status": {}}
JOB = {
    "job_id": "report-47.1",
    "agent": "writer",
    "status": "dead_lettered",
    "reason": "dependency_failed",
    "total_cost": "0.000000000",
    "queued_at": "2026-11-21T10:00:00.000Z",
    "completed_at": "2026-11-21T10:00:02.000Z",
}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET plans"] = (200, {"plans": [PLAN, REFUSED]})
    stub.answers["GET plans/report-47"] = (200, PLAN | {"jobs": [JOB]})
    stub.answers["GET plans/p2"] = (200, REFUSED)
    return stub


async def test_plans_are_listed_with_their_state_cost_and_waste(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "plans")
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    _, first, second = ran.out.splitlines()
    assert first.split()[:8] == ["report-47", "partial", "2", "succeeded,", "1", "dead", "lettered", "$0.000042"]
    assert "$0.000002" in first
    assert second.split()[:3] == ["p2", "failed", "none"]
    assert stub.queries == [{"limit": "20"}]
    assert (await in_thread(run, "plans", "--json")).json == {"plans": [PLAN, REFUSED]}


async def test_one_is_shown_with_its_jobs_or_why_it_was_refused(run: Run, stub: Stub) -> None:
    shown = (await in_thread(run, "plans", "show", "report-47")).out
    assert "  cost          $0.000042 (estimated)\n" in shown
    assert "report-47.1  writer  dead_lettered  dependency_failed  $0.00" in shown
    assert "the agent is down" in (await in_thread(run, "plans", "show", "p2")).out
    assert (await in_thread(run, "plans", "show", "p2", "--json")).json == REFUSED
