"""`breakwater guards`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(minutes=3)

STOPPED = [
    {
        "task_id": "t1",
        "agent": "writer",
        "rule": "max_cost",
        "reason": "$10.50 spent (limit: $10.00)",
        "since": format_time(SINCE - timedelta(seconds=1)),
    },
    {
        "task_id": "t2",
        "tenant": "acme",
        "agent": "writer",
        "execution_id": "e9",
        "rule": "max_iterations",
        "reason": "10 iterations (limit: 10)",
        "since": format_time(SINCE),
    },
]
RESET = {
    "event_id": "x",
    "kind": "reset",
    "agent": "writer",
    "tenant": "acme",
    "task_id": "t2",
    "reason": "reset by ops: mended",
    "by": "ops",
    "iterations": 1,
    "tokens": 200_312,
    "cost": "1.200000000",
    "consecutive_failures": 0,
    "total_failures": 0,
    "unique_errors": 0,
    "at": format_time(NOW),
}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET guards"] = (200, {"stopped": STOPPED})
    return stub


@pytest.mark.parametrize("command", [["guards"], ["guards", "list"]], ids=" ".join)
async def test_stopped_tasks_are_listed_the_latest_first_with_their_rule(
    run: Run, stub: Stub, command: list[str]
) -> None:
    ran = await in_thread(run, *command)
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    _, second, first = ran.out.splitlines()
    assert second.split()[:4] == ["t2", "acme", "writer", "max_iterations"]
    assert second.endswith("e9         10 iterations (limit: 10)")
    assert clock(SINCE, NOW) in second
    assert first.split()[:3] == ["t1", "writer", "max_cost"]
    assert (await in_thread(run, *command, "--json")).json == {"stopped": STOPPED}


async def test_that_none_is_stopped_is_said(run: Run, stub: Stub) -> None:
    stub.answers["GET guards"] = (200, {"stopped": []})
    ran = await in_thread(run, "guards")
    assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "", "no task is stopped\n")


async def test_a_task_is_reset_and_what_it_had_used_is_said(run: Run, stub: Stub) -> None:
    stub.answers["POST guards/reset"] = (200, RESET)
    ran = await in_thread(run, "guards", "reset", "t2", "--tenant", "acme", "--reason", "mended")
    assert stub.asked == [("POST guards/reset", {"task_id": "t2", "tenant": "acme", "reason": "mended"})]
    assert ran.out == "t2 of acme may continue: reset by ops: mended\n"
    assert "1 iteration, 200,312 tokens and $1.20" in ran.err
    assert (await in_thread(run, "guards", "reset", "t2", "--json")).json == RESET
    assert stub.asked[-1] == ("POST guards/reset", {"task_id": "t2"})
