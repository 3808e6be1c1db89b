"""`breakwater plans`, against a stub of the HTTP interface."""

from __future__ import annotations

from tests.api_documents import plan
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

JOB = {
    "job_id": "report-47.1",
    "execution_id": "report-47.1",
    "agent": "writer",
    "status": "dead_lettered",
    "reason": "dependency_failed",
    "total_cost": "0.000000000",
    "queued_at": "2026-11-21T10:00:00.000Z",
    "completed_at": "2026-11-21T10:00:02.000Z",
}


async def test_one_is_shown_with_its_jobs(run: Run, stub: Stub) -> None:
    document = plan("report/47", jobs=[JOB])
    stub.answers["GET plans/report/47"] = (200, document)
    shown = (await in_thread(run, "plans", "show", "report/47")).out
    assert "  cost          $0.42 (estimated)\n" in shown
    assert "report-47.1  writer  dead_lettered  dependency_failed  $0.00" in shown
    assert (await in_thread(run, "plans", "show", "report/47", "--json")).json == document
