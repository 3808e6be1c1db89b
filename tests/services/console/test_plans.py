"""The page of plans."""

from __future__ import annotations

from typing import Any

from breakwater.records import rows, schema
from tests.records import samples
from tests.services.console.conftest import Console

PLAN: dict[str, Any] = {
    "plan_id": "report/47",
    "state": "partial",
    "jobs_by_status": {"succeeded": 2, "dead_lettered": 1},
    "total_cost": "0.420000000",
    "wasted_cost": "0.020000000",
    "cost_basis": "estimated",
    "first_queued_at": "2026-11-21T10:00:00.000Z",
    "last_completed_at": "2026-11-21T10:00:02.000Z",
}
REFUSED = {
    "plan_id": "p2",
    "state": "failed",
    "refusal": "<b>down</b>",
    "jobs_by_status": {},
    "cost_basis": "billed",
    "total_cost": "0",
}


async def test_a_plan_is_one_row_with_its_state_cost_and_waste(console: Console) -> None:
    console.interface.answers["GET plans"] = 200, {"plans": [PLAN, REFUSED]}
    page = await console.get("/plans")
    assert page.status == 200
    assert "report/47 partial 2 succeeded, 1 dead lettered $0.42 estimated $0.02" in page.words
    assert "p2 failed <b>down</b> none $0" in page.words
    assert "<b>down" not in page.text
    assert 'href="/executions?window=30d&amp;plan_id=report/47"' in page.text
    lines = (await console.get("/plans?csv=list")).text.splitlines()
    assert lines[1].startswith("report/47,partial,3,0.420000000,0.020000000,estimated,2026-11-21T10:00:00.000Z")
    console.interface.answers["GET plans"] = 200, {"plans": []}
    assert "No plans" in (await console.get("/plans")).words


async def test_an_execution_links_to_the_others_of_its_plan(console: Console) -> None:
    jobs = [samples.execution("a", plan_id="p"), samples.execution("b", plan_id="q")]
    await console.analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(jobs)])
    page = await console.get("/executions/a")
    assert "/executions?window=30d&amp;plan_id=p" in page.text
    filtered = await console.get("/executions?window=30d&plan_id=p&from=2026-01-01T00:00")
    assert "/executions/a" in filtered.text
    assert "/executions/b" not in filtered.text
