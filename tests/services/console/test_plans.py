"""The page of plans."""

from __future__ import annotations

import re

from breakwater.records import rows, schema
from tests.api_documents import AT, Document, plan
from tests.cli.api_stub import problem
from tests.records import samples
from tests.services.console.conftest import Console
from tests.services.console.inert import check_page

EVIL = "<script>alert(1)</script>"


async def test_a_plan_leads_to_its_page(console: Console) -> None:
    refused = plan("p2", state="failed", refusal="the agent is down", jobs_by_status={}, total_cost="0")
    console.interface.answers["GET plans"] = 200, {"plans": [plan(), refused]}
    page = await console.get("/plans")
    assert "report/47 partial 2 succeeded, 1 dead lettered $0.42 estimated $0.02" in page.words
    assert "p2 failed the agent is down none" in page.words
    assert 'href="/plans/report%2F47"' in page.text


def planned(name: str, *depends_on: str, status: str = "succeeded") -> Document:
    ended = {"completed_at": AT, "total_cost": "0.100000000", "wasted_cost": "0.010000000"}
    ids = {"execution_id": f"x-{name}", "job_id": name, "agent": "writer"}
    return {
        **ids,
        "status": status,
        "depends_on": depends_on,
        "queued_at": AT,
        **(ended if status != "pending" else {}),
    }


async def test_a_plan_has_a_page_with_its_graph_its_jobs_and_their_costs(console: Console) -> None:
    jobs = [
        planned("gather"),
        planned(EVIL, "x-gather", status="dead_lettered"),
        planned("sum up", "x-gather", f"x-{EVIL}", status="pending"),
    ]
    console.interface.answers["GET plans/report/47"] = 200, plan(jobs=jobs)
    page = await console.get("/plans/report%2F47")
    check_page(page.text)
    _, graph = page.text.split('<section class="card" id="graph"')
    graph, _ = graph.split('<section class="card" id="jobs"')
    for name, tone, status, cost in (
        ("gather", "good", "succeeded", r", \$0\.10"),
        ("sum up", "", "pending", ""),
    ):
        link = f'<a href="/executions/x-{name.replace(" ", "%20")}">'
        node = f'{link}.*<rect class="{tone}".*>{name}</text>.*>{status}{cost}</text>'
        assert re.search(node, graph), name
    gathered_for_the_sum = "M194 26C219 26 219 80 244 80H434C459 80 459 26 484 26"
    assert gathered_for_the_sum in graph, "past the node between them"
    assert len(re.findall("<path ", graph)) == 3
    assert EVIL not in page.text
    assert "Wasted $0.02 on calls without a result" in page.words
    assert "Cost $0.42 estimated" in page.words
    assert f"{EVIL} writer dead lettered – $0.10 $0.01 gather" in page.words
    assert f"sum up writer pending – – – gather, {EVIL}" in page.words
    console.interface.answers["GET plans/p"] = 200, plan("p", jobs=[planned("alone")])
    assert "No dependencies are known" in (await console.get("/plans/p")).words
    console.interface.answers["GET plans/nope"] = 404, problem("unknown_plan", "there is no plan 'nope'")
    missing = await console.get("/plans/nope")
    assert (missing.status, "there is no plan 'nope'" in missing.words) == (404, True)


async def test_a_plan_of_hundreds_of_jobs_has_few_nodes_and_all_jobs_in_its_csv(console: Console) -> None:
    jobs = [planned("gather"), *(planned(f"part {number}", "x-gather") for number in range(300))]
    console.interface.answers["GET plans/big"] = 200, plan("big", jobs=jobs)
    page = await console.get("/plans/big")
    assert page.text.count("<rect ") == 2
    assert ">300 × writer</text>" in page.text
    assert "A node is one job, or all jobs that are alike" in page.words
    assert 'href="/executions?window=30d&amp;plan_id=big&amp;agent=writer&amp;status=succeeded"' in page.text
    assert len((await console.get("/plans/big?csv=jobs")).text.splitlines()) == 302


async def test_an_execution_links_to_the_others_of_its_plan(console: Console) -> None:
    jobs = [samples.execution("a", plan_id="p"), samples.execution("b", plan_id="q")]
    await console.analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, n) for n, one in enumerate(jobs)])
    page = await console.get("/executions/a")
    assert "/executions?window=30d&amp;plan_id=p" in page.text
    filtered = await console.get("/executions?window=30d&plan_id=p&from=2026-01-01T00:00")
    assert "/executions/a" in filtered.text
    assert "/executions/b" not in filtered.text
