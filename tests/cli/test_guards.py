"""`breakwater guards`, against a stub of the HTTP interface."""

from __future__ import annotations

from tests.api_documents import AT, stopped_task
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

RESET = {
    "event_id": "x",
    "kind": "reset",
    "agent": "writer",
    "tenant": "acme",
    "task_id": "t2",
    "task_key": "t2",
    "reason": "reset by ops: mended",
    "by": "ops",
    "iterations": 1,
    "tokens": 200_312,
    "cost": "1.200000000",
    "consecutive_failures": 0,
    "total_failures": 0,
    "unique_errors": 0,
    "at": AT,
}


async def test_stopped_tasks_are_listed_the_latest_first_and_as_json_the_earliest(run: Run, stub: Stub) -> None:
    listed = {"stopped": [stopped_task("t1"), stopped_task("t2", since="2026-11-21T11:00:00.000Z")]}
    stub.answers["GET guards"] = (200, listed)
    rows = (await in_thread(run, "guards")).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["t2", "t1"]
    assert (await in_thread(run, "guards", "--json")).json == listed


async def test_a_task_is_reset_and_what_it_had_used_is_said(run: Run, stub: Stub) -> None:
    stub.answers["POST guards/reset"] = (200, RESET)
    ran = await in_thread(run, "guards", "reset", "t2", "--tenant", "acme", "--reason", "mended")
    assert stub.asked == [("POST guards/reset", {"task_id": "t2", "tenant": "acme", "reason": "mended"})]
    assert ran.out == "t2 of acme may continue: reset by ops: mended\n"
    assert "1 iteration, 200,312 tokens and $1.20" in ran.err
    assert (await in_thread(run, "guards", "reset", "t2", "--json")).json == RESET
    assert stub.asked[-1] == ("POST guards/reset", {"task_id": "t2"})
