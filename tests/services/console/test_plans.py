"""The page of plans."""

from __future__ import annotations

from breakwater.records import rows, schema
from tests.api_documents import plan
from tests.records import samples
from tests.services.console.conftest import Console


async def test_a_plan_leads_to_its_executions(console: Console) -> None:
    refused = plan("p2", state="failed", refusal="the agent is down", jobs_by_status={}, total_cost="0")
    console.interface.answers["GET plans"] = 200, {"plans": [plan(), refused]}
    page = await console.get("/plans")
    assert "report/47 partial 2 succeeded, 1 dead lettered $0.42 estimated $0.02" in page.words
    assert "p2 failed the agent is down none" in page.words
    assert 'href="/executions?window=30d&amp;plan_id=report/47"' in page.text


async def test_an_execution_links_to_the_others_of_its_plan(console: Console) -> None:
    jobs = [samples.execution("a", plan_id="p"), samples.execution("b", plan_id="q")]
    await console.analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(jobs)])
    page = await console.get("/executions/a")
    assert "/executions?window=30d&amp;plan_id=p" in page.text
    filtered = await console.get("/executions?window=30d&plan_id=p&from=2026-01-01T00:00")
    assert "/executions/a" in filtered.text
    assert "/executions/b" not in filtered.text
